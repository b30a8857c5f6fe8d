"""Read a chunk at an address into a column of texts: file formats, remote access and caches.

Stateless, so that any worker can read any chunk. Fetches remote data in byte ranges, with deadlines
and retries. This module is quick to import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.types import Address, MiB

if TYPE_CHECKING:
    import pyarrow.compute as pc


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How to read documents from files. Every field affects the stream."""

    text_field: str = "text"
    separator: bytes | None = None
    chunk_bytes: int = 4 * MiB
    split: str | None = None
    """"train" or "val"."""
    val_fraction: float = 0.0
    split_seed: int = 0
    on_bad_record: str = "raise"
    """"raise", "skip" or "quarantine"."""
    max_doc_bytes: int = 256 * MiB
    max_ratio: float = 1000.0
    skip: frozenset[Address] = field(default_factory=frozenset)
    filter: pc.Expression | None = None
    transform: tuple[str, Callable[[Any], Any]] | None = None
    """A versioned name, and a function of a table of columns."""
