"""A complete trainer on the public API: model, loop, checkpoints, DDP and FSDP, prewarm.

It implements `penstock train`, and is an example for your own trainer.
"""
