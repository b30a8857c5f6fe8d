"""Tokenize a corpus once, on one machine or on a cluster.

The unit of work is the address of a chunk; each result is one immutable file. `PreparedDataset` reads
the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.prepare.local import Prepared as Prepared
    from penstock.prepare.local import prepare as prepare

__all__ = ["Prepared", "prepare"]


def __getattr__(name: str) -> Any:
    # Imported on use, because reading a manifest does not need it.
    if name in __all__:
        from penstock.prepare import local

        return getattr(local, name)
    raise AttributeError(f"module 'penstock.prepare' has no attribute {name!r}")
