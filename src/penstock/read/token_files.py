"""Rows of ids from files that were tokenized before: nanoGPT, llm.c, modded-nanogpt, Megatron, numpy.

A file of n ids gives (n - 1) // seq_len rows of seq_len + 1 ids. Neighbours overlap by one id, since the last
id of a row is only a target. No row crosses files. Files are memory-mapped; a row is addressed by its number
and copied once (16 rows of 1024 in 10 µs), without the GIL.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.config import whole_number
from penstock.errors import ConfigError, CorruptFile, SourceError
from penstock.order.shuffle import I64
from penstock.read.listing import list_files, tell_apart
from penstock.types import FileRef, Span

Ids = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
AnyPath = str | os.PathLike[str]

TYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c's magic numbers, with their version and type of id: GPT-2 (also modded-nanogpt) and Llama 3."""
HEADER_BYTES = 256 * 4
MEGATRON = struct.Struct("<9sQBQQ")
"""Magic, version, type of an id, sequences, entries of the index of documents."""
MEGATRON_TYPES = {4: "<i4", 5: "<i8", 8: "<u2"}
ENDINGS = (".bin", ".npy")


class TokenFile(NamedTuple):
    """A file and how to read it: plain values, cheap to send to another process."""

    path: str
    name: str
    format: Literal["plain", "header", "megatron", "npy"]
    dtype: str
    """The type of an id as it is stored, in numpy's notation."""
    size: int
    offset: int
    """The byte at which the ids begin."""
    tokens: int
    index_size: int = 0
    """Bytes of Megatron's .idx."""


class RowDataset:
    """A map-style dataset of rows of `seq_len + 1` ids, each of which is made by its number."""

    seq_len: int

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Ids:
        row: Ids = self.__getitems__([index + len(self) if index < 0 else index])[0]
        return row

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        """Return the rows at `indices` as a new array."""
        raise NotImplementedError

    def boundaries(self, indices: I64 | Sequence[int]) -> tuple[I64, I64]:
        """Return where documents begin inside the rows at `indices`: which row, and which id of it."""
        self._checked(indices)
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def settings_id(self) -> dict[str, Any]:
        """Return what else the rows depend on, besides the data."""
        return {"seq_len": self.seq_len}

    def _checked(self, indices: I64 | Sequence[int]) -> I64:
        """Return row numbers as an array, or raise IndexError."""
        asked, n = np.asarray(indices, np.int64).reshape(-1), len(self)
        if asked.size and not 0 <= (least := int(asked.min())) <= (most := int(asked.max())) < n:
            raise IndexError(f"row {least if least < 0 else most}: {self} has rows 0 to {n - 1}")
        return asked


class TokenFileDataset(RowDataset):
    """Files of token ids, memory-mapped, as a map-style dataset of rows of `seq_len + 1` ids."""

    def __init__(
        self,
        path: AnyPath | Sequence[AnyPath],
        seq_len: int,
        dtype: Any = "auto",
        *,
        positions: bool = False,
    ) -> None:
        """Open a file, a folder, a glob, a Megatron prefix, or a list of these: .bin and .npy.

        The format is found from the content: a header of llm.c or modded-nanogpt, a numpy array, or
        an .idx beside the file, which makes it Megatron's. Any other file is ids only, as nanoGPT's.

        dtype: the type of the ids in a file that does not name it. "auto" is uint16, as nanoGPT
            writes; larger ids need "uint32". For the other formats it is checked.
        positions: add positions and document masks to batches, for Megatron's documents.
        """
        asked = _type_name(dtype)
        self.files = files = tuple(_inspect(file, asked) for file in _list(path))
        self.seq_len, self.positions = whole_number("seq_len", seq_len, 1), bool(positions)
        counts = np.array([max(0, file.tokens - 1) // seq_len for file in files], np.int64)
        if counts.sum() == 0:
            longest = max(files, key=lambda file: file.tokens)
            raise SourceError(
                f"seq_len={seq_len} needs {seq_len + 1} ids in a file, and {longest.path} has "
                f"{longest.tokens}, the most of {len(files)} files. Choose a smaller seq_len."
            )
        narrow = all(file.dtype == "<u2" for file in files)
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if narrow else np.uint32)
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self._rows: dict[int, Ids] = {}
        self._indices: dict[int, MegatronIndex] = {}

    @classmethod
    def from_binary_file(
        cls, path: AnyPath | Sequence[AnyPath], seq_len: int, dtype: Any = "auto", *,
        positions: bool = False,
    ) -> TokenFileDataset:  # fmt: skip
        """Open files, as `TokenFileDataset(path, seq_len, …)` does."""
        return cls(path, seq_len, dtype, positions=positions)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": {}, "_indices": {}}  # a copy maps the files itself

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"TokenFileDataset({self.files[0].path}, {len(self.files)} files)"

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        groups = self._by_file(indices)
        if len(groups) == 1:
            return self._gather(groups[0][0], groups[0][2])
        out = np.empty((len(indices), self.seq_len + 1), self.dtype)
        for number, at, rows in groups:
            out[at] = self._gather(number, rows)
        return out

    def boundaries(self, indices: I64 | Sequence[int]) -> tuple[I64, I64]:
        found = [np.empty((2, 0), np.int64)]
        for number, at, local in self._by_file(indices):
            if self.files[number].format == "megatron":
                row, column = self._index(number).boundaries(local * self.seq_len, self.seq_len + 1)
                found.append(np.stack([at[row], column]))
        row, column = np.concatenate(found, axis=1)
        order = np.argsort(row, kind="stable")
        return row[order], column[order]

    def spans(self, index: int) -> list[Span]:
        """Return where a row comes from. The offset is the number of its first id in the file.

        For Megatron there is a span for each document, with its number; otherwise one, with the
        row's number in its file.
        """
        ((number, _, local),) = self._by_file([index])
        file, row, length = self.files[number], int(local[0]), self.seq_len + 1
        begin = row * self.seq_len
        if file.format != "megatron":
            return [Span(file.name, None, begin, row, (0, length), (0, length))]
        starts, spans = self._index(number).starts, []
        cuts = [0, *self.boundaries([index])[1].tolist(), length]
        for a, b in itertools.pairwise(cuts):
            document = int(np.searchsorted(starts, begin + a, side="right")) - 1
            first = begin + a - int(starts[document])
            spans.append(Span(file.name, None, begin + a, document, (first, first + b - a), (a, b)))
        return spans

    def data_id(self) -> dict[str, Any]:
        """Return what identifies the data in a state. A copy in another folder is the same data."""
        known = [
            (file.name, file.size, file.index_size, file.dtype, file.format) for file in self.files
        ]
        found = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        tokens = sum(file.tokens for file in self.files)
        return {"kind": "tokens", "hash": found, "files": len(self.files), "tokens": tokens}

    def _by_file(self, indices: I64 | Sequence[int]) -> list[tuple[int, I64, I64]]:
        """Return, for each file that has some: its number, which of `indices`, and their rows in it."""
        asked = self._checked(indices)
        if len(self.files) == 1:
            return [(0, np.arange(asked.size), asked)]
        # Files too short for a row end where they begin, and are passed over.
        number = np.searchsorted(self._ends, asked, side="right")
        found = []
        for n in np.unique(number).tolist():
            at = np.flatnonzero(number == n)
            found.append((n, at, asked[at] - self._begins[n]))
        return found

    def _gather(self, number: int, rows: I64) -> Ids:
        file = self.files[number]
        if (every := self._rows.get(number)) is None:
            # A view of overlapping rows: indexing it is the fastest copy, and numpy releases the GIL.
            kind = np.dtype(file.dtype)
            shape = (file.tokens - 1) // self.seq_len, self.seq_len + 1
            strides = self.seq_len * kind.itemsize, kind.itemsize
            data = _map_file(file.path, file.size)
            every = self._rows[number] = np.ndarray(shape, kind, data, file.offset, strides)
        ids: Ids = every[rows]
        if file.dtype in ("<i4", "<i8") and not 0 <= ids.min() <= ids.max() <= 0xFFFFFFFF:
            raise CorruptFile(
                f"{file.path}: ids from {ids.min()} to {ids.max()} in the rows {rows.tolist()}, and "
                f"ids are 0 to {0xFFFFFFFF}. If they are not {file.dtype}, name their type: dtype=…"
            )
        return ids.astype(self.dtype, copy=False)

    def _index(self, number: int) -> MegatronIndex:
        if number not in self._indices:
            self._indices[number] = MegatronIndex(self.files[number])
        return self._indices[number]


def _map_file(path: str, size: int) -> pa.Buffer:
    """Map a file that had `size` bytes when it was inspected. Its descriptor is closed again."""
    with pa.memory_map(os.fsencode(path)) as file:
        # Reading beyond the end of a mapped file kills the process, so the size is checked.
        if file.size() != size:
            raise CorruptFile(
                f"{path} changed while in use: it had {size} bytes, it has {file.size()}. Start a new "
                "run."
            )
        return file.read_buffer(size)


class MegatronIndex:
    """Megatron's .idx, mapped: the first byte of each sequence and the first sequence of each document."""

    def __init__(self, file: TokenFile) -> None:
        self._path = path = _index_path(file.path)
        data = _map_file(path, file.index_size) if file.index_size else b""
        head = bytes(data[: MEGATRON.size]).ljust(MEGATRON.size, b"\0")
        magic, version, code, n, documents = MEGATRON.unpack(head)
        if magic != b"MMIDIDX\0\0" or version != 1 or code not in MEGATRON_TYPES:
            raise CorruptFile(f"{path} is not an index of Megatron with ids of 16, 32 or 64 bits")
        # Megatron's files with several kinds of data have a byte more for each sequence.
        at, should = MEGATRON.size, MEGATRON.size + 12 * n + 8 * documents
        if len(data) not in (should, should + n) or n == 0:
            raise CorruptFile(
                f"{path} lists {n} sequences, so takes {should} bytes; it has {len(data)}"
            )
        self.dtype = MEGATRON_TYPES[code]
        self._itemsize = np.dtype(self.dtype).itemsize
        self._pointers = np.frombuffer(data, "<i8", n, at + 4 * n)
        self._firsts = np.frombuffer(data, "<i8", documents, at + 12 * n)
        last = int(np.frombuffer(data, "<i4", n, at)[-1])
        end = int(self._pointers[-1]) + last * self._itemsize
        if end != file.size:
            raise CorruptFile(
                f"{path} describes a .bin of {end} bytes, and {file.path} has {file.size}"
            )
        self.tokens = end // self._itemsize

    @cached_property
    def starts(self) -> I64:
        """The first id of each document, in memory: 8 bytes each."""
        if not 0 <= self._firsts.min() <= self._firsts.max() <= self._pointers.size:
            raise CorruptFile(f"{self._path}: a document begins with a sequence that is not there")
        starts: I64 = np.append(self._pointers // self._itemsize, self.tokens)[self._firsts[:-1]]
        return starts

    def boundaries(self, begins: I64, length: int) -> tuple[I64, I64]:
        """Return row and column of the documents that begin inside the rows at `begins`."""
        first = np.searchsorted(self.starts, begins, side="right")
        counts = np.searchsorted(self.starts, begins + length, side="left") - first
        row = np.repeat(np.arange(begins.size), counts)
        document = np.arange(row.size) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        # Empty documents begin where the next one does; the place counts once.
        places = np.unique(np.stack([row, self.starts[document] - begins[row]]), axis=1)
        return places[0], places[1]


def _index_path(path: str) -> str:
    return os.path.splitext(path)[0] + ".idx"


def _list(paths: AnyPath | Sequence[AnyPath]) -> list[FileRef]:
    """Return the files of ids behind `paths`, each once and with a name of its own."""
    sources = [os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    found: dict[str, FileRef] = {}
    for source in sources:
        prefix = Path(source.removesuffix(".idx")).expanduser()
        if not prefix.exists() and Path(f"{prefix}.bin").is_file():
            source = f"{prefix}.bin"
        for file in list_files(source, format="text", whole=False):
            if file.path.endswith(ENDINGS):
                found.setdefault(os.path.realpath(file.path), replace(file, codec=""))
    if not found:
        raise SourceError(
            f"{sources}: no file ends in {' or '.join(ENDINGS)}. Read text with TextDataset."
        )
    return tell_apart([*found.values()])


def _inspect(ref: FileRef, asked: str) -> TokenFile:
    """Find a file's format from its first bytes and from what is beside it."""
    path, size = ref.path, ref.size
    with open(path, "rb") as stream:
        head = stream.read(12)
    magic, version, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    kind = TYPES.get(asked, "<u2")
    file = TokenFile(path, ref.name, "plain", kind, size, 0, size // np.dtype(kind).itemsize)
    if head.startswith(b"\x93NUMPY"):
        file = _inspect_npy(file)
    elif os.path.isfile(_index_path(path)):
        file = file._replace(format="megatron", index_size=os.path.getsize(_index_path(path)))
        index = MegatronIndex(file)
        file = file._replace(dtype=index.dtype, tokens=index.tokens)
    elif magic in HEADERS:
        known, kind = HEADERS[magic]
        file = file._replace(format="header", dtype=kind, offset=HEADER_BYTES, tokens=count)
        should = HEADER_BYTES + count * np.dtype(kind).itemsize
        if (version, size) != (known, should):
            raise CorruptFile(
                f"{path} has a header of {count} ids, version {version}: needs {should} bytes and version "
                f"{known}; it has {size} bytes. Get it again."
            )
    elif size == 0 or size % np.dtype(kind).itemsize:
        raise CorruptFile(f"{path}: {size} bytes are not whole ids of type {kind}. Is it complete?")
    if asked != "auto" and TYPES[asked] != file.dtype:
        raise ConfigError(f"dtype={asked!r}: {path} holds {file.dtype}. Leave dtype out.")
    return file


def _inspect_npy(file: TokenFile) -> TokenFile:
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise CorruptFile(
            f"{file.path} is not a numpy array that can be mapped: {error}"
        ) from error
    kind = array.dtype.str
    if kind not in TYPES.values() or array.ndim != 1:
        raise ConfigError(
            f"{file.path} holds {array.dtype} of shape {array.shape}, and ids are {', '.join(TYPES)} in "
            "one dimension. If its rows are one text, save array.reshape(-1); if each is a sample, "
            "give the loader the array itself."
        )
    return file._replace(format="npy", dtype=kind, offset=array.offset, tokens=array.size)


def _type_name(dtype: Any) -> str:
    try:
        name = "auto" if isinstance(dtype, str) and dtype == "auto" else np.dtype(dtype).name
    except TypeError:
        name = ""
    if dtype is None or name not in ("auto", *TYPES):
        raise ConfigError(f"dtype={dtype!r}: needs 'auto' or one of {', '.join(TYPES)}")
    return name
