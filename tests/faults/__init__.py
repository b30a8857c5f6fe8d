"""Faults of disks and of the network, brought about by the system itself."""
