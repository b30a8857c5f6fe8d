"""The trainer, run as people run it."""
