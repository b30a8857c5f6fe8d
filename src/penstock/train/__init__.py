"""The training side: a small model, its loop, and what warms it up."""
