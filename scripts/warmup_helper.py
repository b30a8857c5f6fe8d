"""Warm up any loader: `penstock.feed.warmup` under the name that training scripts know.

from scripts.warmup_helper import warmup_loader, warmup_loader_with_first_batch
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("penstock") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from penstock.feed.warmup import (
    WarmedIterator,
    Warmup,
    warmup_loader,
    warmup_loader_with_first_batch,
)

__all__ = ["WarmedIterator", "Warmup", "warmup_loader", "warmup_loader_with_first_batch"]
