"""Threads and queues: the only place where any live."""
