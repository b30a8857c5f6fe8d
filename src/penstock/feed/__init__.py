"""Worker pools, the prefetch queue, device copies and agreement between ranks.

The only package that creates threads and processes. `shutdown()` joins all of them.
"""
