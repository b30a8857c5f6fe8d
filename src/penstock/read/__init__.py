"""From an address to a column of texts: stateless, so that any thread can read any chunk."""
