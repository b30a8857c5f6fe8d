"""Look at what a dataset yields: documents put together again from packed rows, chunks read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock import AsyncDataLoader, Shard, TextDataset
from penstock.read import ReadSettings
from penstock.read.listing import list_files
from penstock.read.reader import Reader
from penstock.types import Bad

EOS = 256
"""What ends a document when the tokenizer is "byte"."""


def bytes_of(path: Path | str | list[Any], **settings: Any) -> TextDataset:
    """A dataset whose ids are the bytes of its texts."""
    return limited(path, **{"tokenizer": "byte", "seq_len": 512, **settings})


def limited(path: Any, **settings: Any) -> TextDataset:
    """A dataset that may have lower limits than the constants of a run."""
    names = ("max_doc_bytes", "max_ratio")
    limits = {name: settings.pop(name) for name in names if name in settings}
    dataset = TextDataset(path, **settings)
    dataset.read = replace(dataset.read, **limits)
    return dataset


def open_loader(dataset: TextDataset, **how: Any) -> AsyncDataLoader:
    """One pass without threads, unless told otherwise."""
    return AsyncDataLoader(dataset, **{"batch_size": 1, "n_workers": 0, "epochs": 1, **how})


def ids_of(loader: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The stream of a single lane: its first input, then every target that is not padding."""
    parts: list[Any] = []
    for batch in loader:
        if not parts:
            parts.append(np.asarray(batch.inputs)[0, :1])
        targets = np.asarray(batch.targets)
        parts.append(targets[targets >= 0])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def split_ids(ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[bytes]:
    """Documents of bytes, each of which ends with EOS."""
    assert ids[-1] == EOS, "the stream does not end with a whole document"
    ends = np.flatnonzero(ids == EOS)
    starts = np.concatenate([[0], ends[:-1] + 1])
    flat = ids.astype(np.uint8).tobytes()
    return [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def documents(dataset: TextDataset, **how: Any) -> list[bytes]:
    """The documents of one pass over a single lane, in order."""
    with open_loader(dataset, **how) as loader:
        return split_ids(ids_of(loader))


def documents_of_lanes(dataset: TextDataset, lanes: int, **how: Any) -> list[list[bytes]]:
    """The documents of each lane, read by a shard of its own."""
    return [documents(dataset, shard=Shard(lanes, n), lanes=lanes, **how) for n in range(lanes)]


def read_chunks(path: Path, **settings: Any) -> tuple[list[list[str]], list[Bad]]:
    """What each chunk of a file gives when it is read alone, empty texts left out, and what was rejected."""
    read = ReadSettings(**settings)
    (file,) = list_files(path, whole=read.separator is None)
    reader = Reader(read, 0, 1)
    try:
        refs, bad = reader.inspect(file)
        out = []
        for ref in reversed(refs):  # backwards: no chunk may lean on one before it
            chunk = reader.read(ref)
            out.append([text for text in chunk.texts.to_pylist() if text])
            bad = [*chunk.bad, *bad]
        return out[::-1], bad
    finally:
        reader.close()


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    """A text a line, without escapes."""
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8"
    )
    return path
