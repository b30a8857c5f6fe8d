"""The parts of `watch.steady`: how steps are analysed."""
