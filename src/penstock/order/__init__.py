"""Which chunk and which document comes next: pure functions of the seed and the list of files."""
