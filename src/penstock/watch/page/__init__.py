"""The parts of `watch.report`: what is on the page."""
