"""The parts of `watch.metrics`: names, Prometheus, TensorBoard and the like."""
