"""Metrics for the tools that people already watch: Prometheus, TensorBoard, W&B, torchtitan's names.

In:    progress, by the heartbeat's `on_metrics` hooks, or heartbeat lines.
Out:   the names in this file; the table of metrics is in `exports.table`.
Where: see there.
State: see there.
"""

from __future__ import annotations

from penstock.watch.exports.hooks import Hook, TensorBoardHook, tensorboard, titan_names, wandb_hook
from penstock.watch.exports.server import MetricsServer, serve
from penstock.watch.exports.table import METRICS, Metric, Readings, Sample, flatten

__all__ = [
    "METRICS",
    "Hook",
    "Metric",
    "MetricsServer",
    "Readings",
    "Sample",
    "TensorBoardHook",
    "flatten",
    "serve",
    "tensorboard",
    "titan_names",
    "wandb_hook",
]
