"""What no text loader can avoid: row groups decoded and tokenized by gigatoken on as many threads.

The ids are counted; a batch is an empty one for every 16,384 of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from case import BATCH_SIZE, SEQ_LEN, TOKENS, Case, Pair, Stream
from limit import DecodeAndTokenize


def prepare(case: Case) -> None:
    """Decode and tokenize, and write nothing."""
    limit = DecodeAndTokenize(case.files(), case.vocabulary, case.workers)
    sum(limit.counts())
    limit.close()


def stream(case: Case) -> Stream:
    limit = DecodeAndTokenize(case.files(), case.vocabulary, case.workers)
    empty = np.zeros((BATCH_SIZE, SEQ_LEN), np.int64)

    def batches() -> Iterator[Pair]:
        ids = 0
        for count in limit.counts():
            for _ in range((ids + count) // TOKENS - ids // TOKENS):
                yield empty, empty
            ids += count

    return Stream(batches(), close=limit.close)
