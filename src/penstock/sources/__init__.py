"""Each kind of data: how a dataset becomes batches. Every file is one kind, behind the protocols in `base`."""
