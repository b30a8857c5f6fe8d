"""Every kind of data that a loader takes, in small: what the contracts run on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from penstock import (
    AsyncDataLoader,
    Mixture,
    PreparedDataset,
    Span,
    SyntheticDataset,
    TextDataset,
    TokenFileDataset,
)
from penstock.prepare import prepare
from tests import contracts
from tests.corpus import texts

SEQ = 128
EOS = 256
"""The byte tokenizer's end of a document."""
ROWS = 130
FILES = {
    "parquet": "parquet",
    "many": "many",
    "jsonl": "docs.jsonl",
    "gz": "docs.jsonl.gz",
    "txt": "docs.txt",
}
PACKINGS = ("concat", "best_fit", "bos")


@dataclass(frozen=True)
class Kind:
    """A stream: how to build its dataset, how its loader is set up, what it must contain."""

    build: Callable[[Path], Any]
    """Builds the dataset from the corpus folder, as a restarted program would."""
    loader: dict[str, Any] = field(default_factory=dict)
    read: Callable[[Path, Span], list[int]] | None = None
    """Reads the document or sample of a span again."""
    rows: Callable[[], list[list[int]]] | None = None
    """All rows, if the data is rows already."""
    lanes: int | None = None
    """Lanes that ranks share; None if a row number is enough."""
    text: bool = False
    endless: bool = False
    state_bytes: int = 1024
    """An upper bound of the state of one lane."""

    def maker(self, folder: Path, **fixed: Any) -> contracts.Make:
        """Return a function that builds loaders of this stream."""

        def make(**how: Any) -> AsyncDataLoader:
            defaults = {"batch_size": 8, "seed": 5, "n_workers": 2}
            return AsyncDataLoader(
                self.build(folder), **{**defaults, **self.loader, **fixed, **how}
            )

        return make

    def finite(self) -> dict[str, Any]:
        """Return the loader's arguments for two passes, if the stream can end."""
        return {} if self.endless else {"epochs": 2, "drop_last": False}


# Text


def documents() -> list[list[int]]:
    """Return the ids of each document of the corpus, in the order of the files."""
    return [[*text.encode(), EOS] for text in texts() if text]


def text_kind(source: str, packing: str, shuffle: bool) -> Kind:
    def build(folder: Path) -> Any:
        if source == "prepared":
            out, positions = prepared(folder), packing == "best_fit"
            return PreparedDataset(
                out, seq_len=SEQ, packing=packing, positions=positions, shuffle_blocks=4
            )
        about: dict[str, Any] = {
            "tokenizer": "byte",
            "seq_len": SEQ,
            "packing": packing,
            "shuffle_chunks": 4,
            "positions": packing == "best_fit",
        }
        if source == "iterable":
            return TextDataset.from_iterable(items, chunk_docs=5, name="items", **about)
        separator = "\0\0" if source == "txt" else None
        return TextDataset(folder / FILES[source], chunk_bytes=4096, separator=separator, **about)

    def read(folder: Path, span: Span) -> list[int]:
        return [*read_text(source, folder, span).encode(), EOS]

    return Kind(build, {"shuffle": shuffle}, read, lanes=4, text=True)


def prepared(folder: Path) -> Path:
    """Return the Parquet files as a prepared corpus."""
    out = folder.parent / f"{folder.name}-prepared"  # the corpus holds text only
    if not (out / "manifest.json").exists():
        prepare(folder / FILES["parquet"], tokenizer="byte", out=out)
    return out


def items() -> Iterator[str]:
    yield from texts()


@cache
def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def read_text(source: str, folder: Path, span: Span) -> str:
    if source == "iterable":
        assert span.offset is not None
        return texts()[span.offset]
    if source in ("parquet", "many", "prepared"):
        assert span.row_group is not None
        file = folder / FILES.get(source, "parquet") / span.file
        column = pq.ParquetFile(file).read_row_group(span.row_group, ["text"]).column("text")
        return str(column[span.row].as_py())
    rest = content(folder / FILES[source])[span.offset :]
    if source == "txt":
        return rest.partition(b"\0\0")[0].decode()
    return str(json.loads(rest.partition(b"\n")[0])["text"])


# Rows and samples


def token_ids() -> np.ndarray[Any, Any]:
    return (np.arange(ROWS * SEQ + 1) * 7 % 251).astype(np.uint16)


@cache
def token_rows() -> list[list[int]]:
    ids = token_ids().tolist()
    return [ids[row * SEQ : (row + 1) * SEQ + 1] for row in range(ROWS)]


def token_files(folder: Path) -> TokenFileDataset:
    path = folder.parent / f"{folder.name}-tokens" / "ids.bin"  # the corpus holds text only
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        token_ids().tofile(path)
    return TokenFileDataset.from_binary_file(path, seq_len=SEQ)


def synthetic(_: Path) -> SyntheticDataset:
    return SyntheticDataset(seq_len=SEQ, num_samples=ROWS, vocab_size=EOS + 1)


@cache
def synthetic_rows() -> list[list[int]]:
    data = synthetic(Path())
    return [np.asarray(data[row]).tolist() for row in range(ROWS)]


class Samples:
    """A map-style dataset of rows of ids."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return np.arange(SEQ + 1) % 100 + index


@cache
def sample_rows() -> list[list[int]]:
    return [Samples()[row].tolist() for row in range(ROWS)]


def iterate_samples() -> Iterator[Any]:
    for row in sample_rows():
        yield np.array(row)


def add_noise(sample: Any, rng: np.random.Generator) -> Any:
    return sample + rng.integers(0, 1000)


def collate(samples: list[Any]) -> Any:
    return {"input_ids": np.stack(samples), "sum": np.array([s.sum() for s in samples])}


class Records(Samples):
    """A map-style dataset of mappings."""

    def __getitem__(self, index: int) -> Any:
        ids = np.arange(SEQ) + index
        return {"input_ids": ids, "labels": ids + 1, "weight": index / 2, "name": f"#{index}"}


class Stateful:
    """An iterable with a state of its own, as those of torchdata have."""

    def __init__(self, items: list[Any]) -> None:
        self._items, self._at, self._start = items, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self._at, self._start = self._start, 0
        while self._at < len(self._items):
            self._at += 1
            yield self._items[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["at"]


def row_kind(
    build: Callable[[Path], Any], rows: Callable[[], list[list[int]]], shuffle: bool
) -> Kind:
    return Kind(build, {"shuffle": shuffle}, lambda _, span: rows()[span.row], rows)


# Mixtures

MIXED = {"text": 0.5, "stream": 0.2, "tokens": 0.2, "made": 0.1}


def mixture(folder: Path, on_end: Literal["restart", "stop"]) -> Mixture:
    parts = {
        "text": text_kind("parquet", "concat", False).build(folder),
        "stream": text_kind("iterable", "concat", False).build(folder),
        "tokens": token_files(folder),
        "made": synthetic(folder),
    }
    return Mixture({name: (part, MIXED[name]) for name, part in parts.items()}, on_end=on_end)


def read_mixed(folder: Path, span: Span) -> list[int]:
    if span.file == "items":
        return [*read_text("iterable", folder, span).encode(), EOS]
    if span.file.endswith(".parquet"):
        return [*read_text("parquet", folder, span).encode(), EOS]
    return (synthetic_rows() if span.file == "synthetic" else token_rows())[span.row]


def mixture_kind(on_end: Literal["restart", "stop"], shuffle: bool) -> Kind:
    return Kind(
        lambda folder: mixture(folder, on_end),
        {"shuffle": shuffle},
        read_mixed,
        lanes=4,
        endless=on_end == "restart",
        state_bytes=2048,
    )


# All of them

TEXT = {
    f"{source} {packing}{' shuffled' * shuffle}": text_kind(source, packing, shuffle)
    for source in (*FILES, "iterable", "prepared")
    for packing in PACKINGS
    for shuffle in (False, True)
}
ROW_NUMBERS = {
    f"{name}{' shuffled' * shuffle}": row_kind(build, rows, shuffle)
    for name, build, rows in (
        ("tokens", token_files, token_rows),
        ("synthetic", synthetic, synthetic_rows),
        ("samples", lambda _: Samples(), sample_rows),
    )
    for shuffle in (False, True)
}
ITERATED = {
    name: Kind(build, {}, lambda _, span: sample_rows()[span.row], sample_rows)
    for name, build in (
        ("iterated samples", lambda _: iterate_samples),
        ("stateful samples", lambda _: Stateful(list(iterate_samples()))),
    )
}
PROCESSED = {
    "preprocessed": Kind(lambda _: Samples(), {"preprocess": add_noise}),
    "collated": Kind(lambda _: Samples(), {"collate": collate}),
    "records": Kind(lambda _: Records(), {}),
}
MIXTURES = {
    f"mixture {on_end}{' shuffled' * shuffle}": mixture_kind(on_end, shuffle)
    for on_end in ("restart", "stop")
    for shuffle in (False, True)
}
KINDS = TEXT | ROW_NUMBERS | ITERATED | PROCESSED | MIXTURES

SLOW = {
    name
    for name in TEXT
    # Packing does not depend on where the text comes from: one source runs with every packing.
    if not name.startswith("parquet")
    and "concat" not in name
    and name != "iterable best_fit shuffled"
}
"""Kinds whose contracts run in the slow tests only."""
