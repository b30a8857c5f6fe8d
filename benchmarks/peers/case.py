"""What a contender is given and what it returns: the same work for all.

Every contender imports this in its own environment, so it imports nothing but numpy.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

BATCH_SIZE, SEQ_LEN = 16, 1024
TOKENS = BATCH_SIZE * SEQ_LEN
EOS = "<|endoftext|>"
SEED = 42

Ids = npt.NDArray[np.generic]
Pair = tuple[Any, Any]
"""Inputs and targets of (16, 1024) ids each, int64, numpy or torch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contender's work: the column `text` of Parquet files, end-of-text after each document."""

    contender: str
    """A module of contenders/."""
    variant: str = ""
    """What the module makes of it: another tokenizer library, another format."""
    tokenizer: Literal["own", "ours", "none"] = "own"
    """That of the contender's documentation, Penstock's, or none (its data is tokens)."""
    source: str
    """A folder of Parquet files, or hf://datasets/NAME with HF_ENDPOINT in the environment."""
    vocabulary: str
    """A tokenizer.json."""
    prepared: str = ""
    """A folder that the contender's own `prepare` has filled."""
    passes: int = 1
    workers: int = 2
    shuffle: bool = False
    """As the contender's documentation does it. False: documents in their order."""
    state: str = ""
    """A file with the pickled state to resume from."""

    def json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Case:
        return cls(**json.loads(text))

    @property
    def remote(self) -> bool:
        return "://" in self.source

    def files(self) -> list[Path]:
        """Return the Parquet files of a local source in their order."""
        return sorted(Path(self.source).glob("*.parquet"))

    def row_groups(self) -> list[tuple[str, int]]:
        """Return file and number of every row group of a local source."""
        import pyarrow.parquet as pq

        counts = [(str(file), pq.read_metadata(file).num_row_groups) for file in self.files()]
        return [(file, group) for file, groups in counts for group in range(groups)]

    def saved(self) -> Any:
        """Return the state to resume from; None at a start from the beginning."""
        return pickle.loads(Path(self.state).read_bytes()) if self.state else None


@dataclass
class Stream:
    """What a contender's `stream(case)` returns: one pass, incomplete batches dropped.

    `state` returns anything that pickle takes, from which the next batch follows; None if the
    contender has no state.
    """

    batches: Iterator[Any]
    state: Callable[[], Any] | None = None
    close: Callable[[], object] = lambda: None


class NotOffered(Exception):
    """The contender has no way to do this. The message says why, for the table."""


def read_texts(file: Any, group: int) -> Any:
    """Return the texts of a row group as one Arrow array."""
    import pyarrow.parquet as pq

    opened = file if isinstance(file, pq.ParquetFile) else pq.ParquetFile(file)
    return opened.read_row_group(group, columns=["text"]).column(0).combine_chunks()


class Packer:
    """Concatenate ids and cut batches, for contenders that leave packing to their users."""

    def __init__(self, rest: Ids | None = None) -> None:
        self.rest: Ids = np.empty(0, np.uint16) if rest is None else rest
        """What has not filled a batch: a checkpoint has to hold it."""

    def add(self, ids: Ids) -> Iterator[Pair]:
        """Yield the batches that are complete with these ids."""
        flat = np.concatenate((self.rest, ids)) if len(self.rest) else ids
        self.rest = flat
        for at in range(0, len(flat) - TOKENS, TOKENS):
            self.rest = flat[at + TOKENS :]  # before the batch is given: it may be asked for then
            yield cut(flat[at : at + TOKENS + 1])


def cut(flat: Ids) -> Pair:
    """Make a batch from 16 * 1024 + 1 ids. The last id of a row opens the next: none is lost."""
    shape = BATCH_SIZE, SEQ_LEN
    return flat[:-1].astype(np.int64).reshape(shape), flat[1:].astype(np.int64).reshape(shape)


def as_tensors(pair: Pair) -> Pair:
    import torch

    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])
