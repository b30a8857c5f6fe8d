"""Turn a dataset into a stream of batches: one module for each kind of data.

All of them implement the protocols of `base`; `factory` chooses by the dataset's type.
"""
