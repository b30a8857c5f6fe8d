"""Run the work: worker pools, the prefetch queue, device copies and agreement between ranks.

The only package that creates threads and processes. `shutdown()` joins every one of them.
"""
