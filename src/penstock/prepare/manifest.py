"""The manifest of a prepared corpus: its sources, and the location of every block of tokens.

`plan.json` is written first: source files with versions, tokenizer and settings. Later runs into
the same place must match it. `entries.arrow` lists entries and their blocks. `manifest.json` is
written last, with checksums; a corpus without it is unfinished. None of the files holds a time or a
host, so every engine writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, CorruptFile, SourceError
from penstock.order.shuffle import I64
from penstock.read.arrow_utils import as_numpy, integers
from penstock.read.token_store import Block, Header, TokenStore
from penstock.types import ChunkRef, FileRef, Member

FORMAT = 1
PLAN, ENTRIES, MANIFEST = "plan.json", "entries.arrow", "manifest.json"
BLOCK_TOKENS = 1 << 16
"""Approximate number of tokens in a block."""
COLUMNS = ("length", "documents", "id_bytes", "crc32")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parsed manifest of a prepared corpus."""

    about: dict[str, Any]
    """The content of `manifest.json`."""
    files: tuple[FileRef, ...]
    """The source files, for provenance."""
    names: pa.StringArray
    """The name of each entry in the store."""
    file_numbers: I64
    chunks: I64
    """The source file and chunk of each entry."""
    first_blocks: I64
    """The corpus-wide number of each entry's first block, and the total at the end."""
    offsets: I64
    """The byte offset of each block in its entry."""
    blocks: dict[str, I64]
    """The bytes, documents, bytes of ids and CRC-32 of each block."""

    def documents_of_entries(self) -> I64:
        """Return the number of documents of each entry."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.blocks["documents"])])
        return np.diff(ends[self.first_blocks])

    def locate(self, numbers: I64) -> tuple[I64, list[str], list[Block]]:
        """Return the entry of each block, its name, and the block."""
        entries = np.searchsorted(self.first_blocks, numbers, side="right") - 1
        columns = [self.offsets, *(self.blocks[name] for name in COLUMNS)]
        blocks = map(Block, *(column[numbers].tolist() for column in columns))
        return entries, self.names.take(integers(entries)).to_pylist(), list(blocks)


def read_blocks(store: TokenStore, name: str, blocks: Sequence[Block]) -> pa.RecordBatch:
    """Return the documents and rows of adjacent blocks, after verifying them."""
    try:
        return store.read_blocks(name, blocks)
    except FileNotFoundError:
        raise CorruptFile(f"{store.place}/{name} is missing") from None


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )


def _read_json(store: TokenStore, name: str) -> Any:
    data = store.read_file(name)
    try:
        return json.loads(data)
    except ValueError as error:
        raise CorruptFile(f"{store.place}/{name} is damaged: {error}") from error


def agree_on_plan(store: TokenStore, plan: dict[str, Any]) -> None:
    """Write the plan. Raise if entries of another plan exist in the same place."""
    try:
        difference = _difference(_read_json(store, PLAN), json.loads(to_json(plan)))
    except FileNotFoundError:
        store.write_file(PLAN, to_json(plan))
        return
    if not difference:
        return
    if any(True for _ in store.list()):
        raise SourceError(
            f"{store.place} was begun with other data or settings: {difference}. Prepare into "
            "another place, or remove that one and start again."
        )
    store.write_file(PLAN, to_json(plan))  # the earlier run failed before its first entry


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe how a plan differs from an earlier one. Empty if it does not."""
    before, now = ({f["source"].partition("\n")[0]: f for f in p["files"]} for p in (old, new))
    for path in before | now:
        if path not in now or path not in before:
            return f"{path} {'was added' if path in now else 'is gone'}"
        if before[path] != now[path]:
            return f"{path} changed"
    if old["files"] != new["files"]:
        return "the order of the files changed"
    values, others = ({**p, **p["settings"], "settings": None} for p in (new, old))
    for name, value in values.items():
        if value != others.get(name):
            return f"{name} was {others.get(name)}, is {value}"
    return ""


def require_settings(store: TokenStore, settings: dict[str, Any]) -> None:
    """Raise if a corpus was prepared with settings that differ from those of a run."""
    try:
        plan = _read_json(store, PLAN)
    except FileNotFoundError:
        raise ConfigError(f"store={store.place!r}: is not a prepared corpus") from None
    for name, value in json.loads(to_json(settings)).items():
        if plan["settings"].get(name) != value:
            raise ConfigError(
                f"store={store.place!r}: was prepared with {name}={plan['settings'].get(name)}, not "
                f"{value}, so none of it can be used. Use the same settings, or prepare it again."
            )


def write_manifest(
    store: TokenStore,
    plan: dict[str, Any],
    files: Sequence[FileRef],
    entries: Sequence[tuple[ChunkRef, Header]],
    bad_files: dict[str, int],
) -> dict[str, Any]:
    """Write the manifest of a complete corpus."""
    numbers = {file.path: number for number, file in enumerate(files)}
    headers = [header for _, header in entries]
    blocks = [block for header in headers for block in header.blocks]
    counts = np.array([0, *(len(header.blocks) for header in headers)])
    columns = [integers(np.array([getattr(b, name) for b in blocks])) for name in COLUMNS]
    kinds = [pa.int64() if name == "id_bytes" else pa.uint32() for name in COLUMNS]
    struct = pa.StructArray.from_arrays(
        [column.cast(kind) for column, kind in zip(columns, kinds, strict=True)], COLUMNS
    )
    table = pa.table(
        {
            "name": pa.array([header.key.name for header in headers], pa.string()),
            "file": integers(np.array([numbers[ref.file.path] for ref, _ in entries])),
            "chunk": integers(np.array([ref.index for ref, _ in entries])),
            "size": integers(np.array([header.size for header in headers])),
            "begin": integers(np.array([h.blocks[0].offset if h.blocks else 0 for h in headers])),
            "blocks": pa.LargeListArray.from_arrays(integers(np.cumsum(counts)), struct),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    bad = Counter(bad_files)
    bad.update(reason for header in headers for _, reason, _ in header.chunk["bad"])
    itemsize = np.dtype(plan["tokenizer"]["dtype"]).itemsize
    about = plan | {
        "entries": len(headers),
        "blocks": len(blocks),
        "documents": sum(block.documents for block in blocks),
        "tokens": sum(block.id_bytes for block in blocks) // itemsize,
        "bytes": sum(header.size for header in headers),
        "text_bytes": sum(header.chunk["text_bytes"] for header in headers),
        "empty": sum(header.chunk["empty"] for header in headers),
        "filtered": sum(header.chunk["filtered"] for header in headers),
        "bad": dict(sorted(bad.items())),
        "entries_sha256": hashlib.sha256(data).hexdigest(),
    }
    about["sha256"] = hashlib.sha256(to_json(about)).hexdigest()
    store.write_file(ENTRIES, data)
    store.write_file(MANIFEST, to_json(about))
    return about


def read_manifest(store: TokenStore) -> Manifest:
    """Read and check the manifest of a corpus."""
    path = f"{store.place}/{MANIFEST}"
    try:
        about, data = _read_json(store, MANIFEST), store.read_file(ENTRIES)
    except FileNotFoundError as error:
        raise SourceError(
            f"{store.place} is not a prepared corpus: it has no {error.filename or MANIFEST}. If "
            "`penstock prepare` was interrupted, run it again: it makes what is missing."
        ) from None
    if about.get("format") != FORMAT:
        raise CorruptFile(f"{path} has format {about.get('format')}, not {FORMAT}")
    sha256 = about.pop("sha256", None)
    if sha256 != hashlib.sha256(to_json(about)).hexdigest():
        raise CorruptFile(f"{path} is damaged: its checksum does not match")
    if hashlib.sha256(data).hexdigest() != about["entries_sha256"]:
        raise CorruptFile(f"{store.place}/{ENTRIES} is damaged: its checksum does not match")
    table = pa.ipc.open_stream(data).read_all().combine_chunks()
    columns = {name: table.column(name).chunk(0) for name in table.column_names}
    lists = columns["blocks"]
    first = as_numpy(lists.offsets)
    blocks = {name: as_numpy(lists.values.field(name)).astype(np.int64) for name in COLUMNS}
    # The blocks of an entry are contiguous, from its byte `begin` on.
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks["length"])])
    offsets = ends[:-1] + np.repeat(as_numpy(columns["begin"]) - ends[first[:-1]], np.diff(first))
    return Manifest(
        about | {"sha256": sha256}, tuple(map(_file, about["files"])), columns["name"],
        as_numpy(columns["file"]), as_numpy(columns["chunk"]), first, offsets, blocks,
    )  # fmt: skip


def _file(values: dict[str, Any]) -> FileRef:
    path = values["source"].partition("\n")[0]
    members = tuple(Member(name, name, 0) for name in values["members"])
    return FileRef(path, values["name"], values["size"], values["format"], members=members)


def missing_entries(store: TokenStore) -> dict[str, str]:
    """Return the missing entries of a corpus, each with a message."""
    try:
        names = read_manifest(store).names.to_pylist()
    except SourceError:  # a cache, or an unfinished corpus
        return {}
    found = {entry.name for entry in store.list()}
    return {name: f"{store.place}/{name} is missing" for name in names if name not in found}
