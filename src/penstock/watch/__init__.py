"""Watching a run: what it does, why it waits, when it is warm, whether it is well."""
