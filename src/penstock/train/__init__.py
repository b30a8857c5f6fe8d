"""A complete trainer on the public API: model, loop, checkpoints, DDP and FSDP, prewarm.

It is the example for trainers of your own, and what `penstock train` runs.
"""
