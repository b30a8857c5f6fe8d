"""Penstock, as its README has it.

Variant "" has no torch and gives numpy; "torch" gives tensors. Without a tokenizer it reads a file of
ids, which `prepare` makes. Variant "prepared" prepares a corpus and reads it, as tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from case import BATCH_SIZE, SEQ_LEN, Case, Pair, Stream, read_texts

TOKEN_FILE = "tokens.bin"


def prepare(case: Case) -> None:
    """Write all ids into one file, or prepare a corpus."""
    if case.variant == "prepared":
        from penstock.prepare import prepare as prepare_corpus

        out = Path(case.prepared)
        prepare_corpus(case.source, tokenizer=case.vocabulary, out=out, workers=case.workers)
        return
    from encoders import Gigatoken

    encode = Gigatoken(case.vocabulary)
    temporary = Path(case.prepared) / f".{TOKEN_FILE}"
    with open(temporary, "wb") as file:
        for place in case.row_groups():
            np.asarray(encode(read_texts(*place))).tofile(file)
    temporary.rename(Path(case.prepared) / TOKEN_FILE)


def stream(case: Case) -> Stream:
    if case.variant not in ("torch", "prepared"):
        sys.modules["torch"] = None  # type: ignore[assignment] # as where it is not installed
    from penstock import AsyncDataLoader, PreparedDataset, TextDataset, TokenFileDataset

    data: Any
    if case.variant == "prepared":
        data = PreparedDataset(case.prepared, seq_len=SEQ_LEN)
    elif case.tokenizer == "none":
        data = TokenFileDataset.from_binary_file(Path(case.prepared) / TOKEN_FILE, SEQ_LEN)
    else:
        data = TextDataset(case.source, tokenizer=case.vocabulary, seq_len=SEQ_LEN)
    order: dict[str, Any] = {"shuffle": case.shuffle, "seed": 1, "epochs": case.passes}
    loader = AsyncDataLoader(data, BATCH_SIZE, n_workers=case.workers, drop_last=True, **order)
    if case.state:
        loader.load_state_dict(case.saved())
    loader.start()
    if case.variant in ("torch", "prepared"):
        import torch  # noqa: F401 (as the README says: while the first batches are made)

    def batches() -> Iterator[Pair]:
        for batch in loader:
            yield batch.inputs, batch.targets

    return Stream(batches(), loader.state_dict, loader.shutdown)
