"""Turn an address into a column of texts: formats, places and what is kept on disk.

Stateless, so that any worker can read any chunk. Remote data is fetched in byte ranges, with
deadlines and retries. This module is quick to import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.types import Address, MiB, OnBadRecord

if TYPE_CHECKING:
    import pyarrow.compute as pc


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How documents are taken out of files. All of it decides the stream."""

    text_field: str = "text"
    separator: bytes | None = None
    chunk_bytes: int = 4 * MiB
    split: Literal["train", "val"] | None = None
    val_fraction: float = 0.0
    split_seed: int = 0
    on_bad_record: OnBadRecord = "raise"
    max_doc_bytes: int = 256 * MiB
    max_ratio: float = 1000.0
    skip: frozenset[Address] = field(default_factory=frozenset)
    filter: pc.Expression | None = None
    transform: tuple[str, Callable[[Any], Any]] | None = None
    """A name with a version, and a function of a table of columns."""
