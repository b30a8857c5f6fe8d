"""Pack documents into rows: which packer for which packing."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.encode.rows import NextWindow, Packer
from penstock.encode.stream import StreamPacker
from penstock.encode.window import Place
from penstock.types import Packing


def make_packer(
    packing: Packing,
    next_window: NextWindow,
    start: Place,
    seq_len: int,
    pad_id: int,
    dtype: np.dtype[Any],
    *,
    keep_tail: bool,
    track: bool,
) -> Packer:
    """The packer for a lane that stands at `start`.

    `keep_tail`: give out the unfinished row at the end of a finite stream. `track`: keep where
    documents begin, for `boundaries`.
    """
    if packing == "best_fit":
        from penstock.encode.best_fit import BestFitPacker

        return BestFitPacker(next_window, start, seq_len, pad_id, dtype)
    aligned = packing == "bos"
    return StreamPacker(
        next_window,
        start,
        seq_len,
        pad_id,
        dtype,
        aligned=aligned,
        keep_tail=keep_tail,
        track=track,
    )
