"""Decide which chunk, document and row comes next.

Pure functions of the seed, the epoch and the list of files: nothing here reads data or keeps state.
"""
