"""Tools beside a run: write text to a local file, fill the token cache."""
