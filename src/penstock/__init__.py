"""Penstock feeds text to a training run, so that the accelerator never waits.

    data = TextDataset("data/*.parquet", tokenizer="byte", seq_len=1024)
    with AsyncDataLoader(data, batch_size=16, shuffle=True, seed=42) as loader:
        for batch in loader:
            ...

Names are imported when they are first used, so that `import penstock` costs nothing.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_imported = time.perf_counter()  # for the ledger of a start

_HOME = {
    "AsyncDataLoader": "loader",
    "Batch": "encode.batch",
    "Heartbeat": "watch.heartbeat",
    "Mixture": "sources.mixture",
    "Remote": "read.attempt",
    "Shard": "types",
    "Span": "types",
    "Stats": "stats",
    "SyntheticDataset": "read.synthetic",
    "Telemetry": "watch.telemetry",
    "TextDataset": "dataset",
    "TokenFileDataset": "read.tokens",
    "Warmup": "tally",
    "analyze_steps": "watch.steady",
    "batched": "sources.samples",
    "prewarm": "train.prewarm",
    "verify_prewarm": "train.prewarm",
    "warmup_loader": "feed.warmup",
    "warmup_loader_with_first_batch": "feed.warmup",
    **dict.fromkeys(
        (
            "AccessDenied", "BadRecord", "ConfigError", "CorruptFile", "FeedStopped", "LoaderClosed", "LoaderTimeout", "MissingExtra",
            "NoData", "Offline", "PeerFailed", "PenstockError", "RemoteError", "SourceChanged", "SourceError", "StateError",
            "StateFormat", "StateMismatch", "TokenizerError", "UnevenRanks", "WorkerDied",
        ),
        "errors",
    ),
}  # fmt: skip

__all__ = [
    "AccessDenied", "AsyncDataLoader", "BadRecord", "Batch", "ConfigError", "CorruptFile", "FeedStopped", "Heartbeat", "LoaderClosed",
    "LoaderTimeout", "MissingExtra", "Mixture", "NoData", "Offline", "PeerFailed", "PenstockError", "Remote",
    "RemoteError", "Shard", "SourceChanged", "SourceError", "Span", "StateError", "StateFormat",
    "StateMismatch", "Stats", "SyntheticDataset", "Telemetry", "TextDataset", "TokenFileDataset", "TokenizerError",
    "UnevenRanks", "Warmup", "WorkerDied", "__version__", "analyze_steps", "batched", "prewarm", "verify_prewarm",
    "warmup_loader", "warmup_loader_with_first_batch",
]  # fmt: skip

if TYPE_CHECKING:
    from penstock.dataset import TextDataset
    from penstock.encode.batch import Batch
    from penstock.errors import (
        AccessDenied,
        BadRecord,
        ConfigError,
        CorruptFile,
        FeedStopped,
        LoaderClosed,
        LoaderTimeout,
        MissingExtra,
        NoData,
        Offline,
        PeerFailed,
        PenstockError,
        RemoteError,
        SourceChanged,
        SourceError,
        StateError,
        StateFormat,
        StateMismatch,
        TokenizerError,
        UnevenRanks,
        WorkerDied,
    )
    from penstock.feed.warmup import warmup_loader, warmup_loader_with_first_batch
    from penstock.loader import AsyncDataLoader
    from penstock.read.attempt import Remote
    from penstock.read.synthetic import SyntheticDataset
    from penstock.read.tokens import TokenFileDataset
    from penstock.sources.mixture import Mixture
    from penstock.sources.samples import batched
    from penstock.stats import Stats
    from penstock.tally import Warmup
    from penstock.train.prewarm import prewarm, verify_prewarm
    from penstock.types import Shard, Span
    from penstock.watch.heartbeat import Heartbeat
    from penstock.watch.steady import analyze_steps
    from penstock.watch.telemetry import Telemetry


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"penstock.{_HOME[name]}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
