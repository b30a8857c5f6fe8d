"""Tools to run before training, on the public API of the loader.

Each module implements the command of its name: bootstrap, doctor, smoke, verify_resume.
"""
