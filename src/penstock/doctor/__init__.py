"""`penstock doctor`: each stage tried alone, then all of it."""
