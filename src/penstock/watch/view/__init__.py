"""The parts of `watch.live`: what the terminal shows."""
