"""Tools for before a training run, on the public API of the loader.

Each module is what the command of its name does: bootstrap, doctor, smoke, verify_resume.
"""
