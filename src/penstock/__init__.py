"""Penstock feeds text to a training run, so that the accelerator does not wait.

    data = TextDataset("data/*.parquet", tokenizer="byte", seq_len=1024)
    with AsyncDataLoader(data, batch_size=16, shuffle=True, seed=42) as loader:
        for batch in loader:
            ...

Names are imported on first use, so that `import penstock` is fast. Further exceptions are in
`penstock.errors`.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dataset import TextDataset as TextDataset
    from penstock.encode.batch import Batch as Batch
    from penstock.errors import ConfigError as ConfigError
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import StateError as StateError
    from penstock.feed.warmup import warmup_loader as warmup_loader
    from penstock.feed.warmup import (
        warmup_loader_with_first_batch as warmup_loader_with_first_batch,
    )
    from penstock.loader import AsyncDataLoader as AsyncDataLoader
    from penstock.options import RemoteOptions as RemoteOptions
    from penstock.read.token_files import SyntheticDataset as SyntheticDataset
    from penstock.read.token_files import TokenFileDataset as TokenFileDataset
    from penstock.sources.mixture import Mixture as Mixture
    from penstock.sources.prepared import PreparedDataset as PreparedDataset
    from penstock.train.prewarm import prewarm as prewarm
    from penstock.types import Shard as Shard
    from penstock.types import Span as Span
    from penstock.watch.heartbeat import Heartbeat as Heartbeat
    from penstock.watch.loader_stats import Stats as Stats
    from penstock.watch.steady_state import analyze_steps as analyze_steps
    from penstock.watch.telemetry import Telemetry as Telemetry

__version__ = "0.2.0"
_imported = time.perf_counter()  # for startup timing

_MODULES = {
    "dataset": ("TextDataset",),
    "encode.batch": ("Batch",),
    "errors": ("ConfigError", "PenstockError", "StateError"),
    "watch.heartbeat": ("Heartbeat",),
    "feed.warmup": ("warmup_loader", "warmup_loader_with_first_batch"),
    "loader": ("AsyncDataLoader",),
    "options": ("RemoteOptions",),
    "read.token_files": ("SyntheticDataset", "TokenFileDataset"),
    "sources.mixture": ("Mixture",),
    "sources.prepared": ("PreparedDataset",),
    "watch.loader_stats": ("Stats",),
    "train.prewarm": ("prewarm",),
    "types": ("Shard", "Span"),
    "watch.steady_state": ("analyze_steps",),
    "watch.telemetry": ("Telemetry",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"penstock.{_HOME[name]}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
