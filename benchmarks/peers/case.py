"""What a contender is given, and what it has to give: the same work for all.

In:    a case, as JSON on the command line of contend.py.
Out:   a stream of batches: inputs and targets of (16, 1024) ids each, numpy or torch, int64.
Where: every contender imports this in an environment of its own, so it imports nothing but numpy, and that late.
State: none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

BATCH_SIZE, SEQ_LEN = 16, 1024
EOS = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contender's work. Documents are in the column `text` of Parquet files; each is followed by end-of-text."""

    contender: str
    """A module of contenders/."""
    variant: str = ""
    """What the module makes of it: another tokenizer library, another format."""
    tokenizer: Literal["own", "ours", "none"] = "own"
    """Which tokenizer: the one that the contender's documentation uses, the one that Penstock uses, or none (tokens)."""
    source: str
    """A folder of Parquet files, or hf://datasets/NAME, with HF_ENDPOINT in the environment."""
    vocabulary: str
    """A tokenizer.json."""
    prepared: str = ""
    """A folder that the contender's own `prepare` has filled, for those that need one."""
    passes: int = 1
    """How often the source is gone through, by those who would be done in an instant."""
    workers: int = 2
    shuffle: bool = False
    """As the contender's documentation does it. Off: documents in their order."""
    state: str = ""
    """A file that holds what the stream's `state` gave, pickled; empty for a start from the beginning."""
    scratch: str = ""
    """A folder for the contender's own caches, empty at the start of the process."""

    def json(self) -> str:
        """To be read by `read`."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Case:
        """The case that was written so."""
        return cls(**json.loads(text))

    def files(self) -> list[Path]:
        """The Parquet files of a local source, in their order."""
        return sorted(Path(self.source).glob("*.parquet"))


class Stream(Protocol):
    """What a contender's `stream(case)` gives. One pass over the source; incomplete batches at the end are dropped."""

    def __next__(self) -> tuple[Any, Any]:
        """Inputs and targets."""

    def state(self) -> Any:
        """What continues after the last batch that was given: anything that pickle takes. None: it has none."""

    def close(self) -> None:
        """Let go of everything."""


class NotOffered(Exception):
    """The contender has no way to do this; the message says what and why, for the table."""
