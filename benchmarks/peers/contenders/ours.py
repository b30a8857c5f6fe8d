"""Penstock, as its README has it.

Variants: "" gives numpy and never imports torch; "torch" gives tensors; "tokens" and "tokens torch" read a file of ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from case import BATCH_SIZE, SEQ_LEN, Case

TOKENS = "tokens.bin"


class Penstock:
    """A loader."""

    def __init__(self, case: Case) -> None:
        from penstock import AsyncDataLoader, TextDataset, TokenFileDataset

        data: Any
        if case.tokenizer == "none":
            data = TokenFileDataset.from_binary_file(Path(case.prepared) / TOKENS, SEQ_LEN)
        else:
            data = TextDataset(case.source, tokenizer=case.vocabulary, seq_len=SEQ_LEN)
        self._loader = AsyncDataLoader(
            data,
            BATCH_SIZE,
            shuffle=case.shuffle,
            seed=1,
            n_workers=case.workers,
            epochs=case.passes,
            drop_last=True,
        )
        if case.state:
            import pickle

            with open(case.state, "rb") as file:
                self._loader.load_state_dict(pickle.load(file))
        self._loader.start()
        if "torch" in case.variant:
            import torch  # noqa: F401 (as the README says: while the first batches are made)

    def __next__(self) -> tuple[Any, Any]:
        batch = next(self._loader)
        return batch.inputs, batch.targets

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        self._loader.shutdown()


def stream(case: Case) -> Penstock:
    """Start it."""
    return Penstock(case)


def prepare(case: Case) -> None:
    """A file of ids."""
    import numpy as np
    import pyarrow.parquet as pq

    from encoders import Gigatoken

    encode = Gigatoken(case.vocabulary)
    temporary = Path(case.prepared) / f".{TOKENS}"
    with open(temporary, "wb") as file:
        for path in case.files():
            opened = pq.ParquetFile(path)
            for group in range(opened.num_row_groups):
                np.asarray(encode(opened.read_row_group(group, columns=["text"]).column(0))).tofile(
                    file
                )
    temporary.rename(Path(case.prepared) / TOKENS)
