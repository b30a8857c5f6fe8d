"""Rows of ids from files that were tokenized before: nanoGPT, llm.c, modded-nanogpt, Megatron, numpy.

In:    paths, and how long a row is.
Out:   rows of seq_len + 1 ids; where documents begin in them, in formats that know; where a row came from.
Where: any thread or process; a copy sent to another process opens the files there again.
State: none but the open maps: a row is addressed by its number.
Cost:  opening: a header a file, whatever its size. A row: one copy out of the page cache (16 rows of
       1024 in 10 µs), without the GIL. Documents: a binary search in the mapped index.

A file of n ids gives (n - 1) // seq_len rows. Neighbours overlap by one id, as the last id of a row is
only ever a target. No row crosses files, and what is left at the end of a file fills none.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.config import whole_number
from penstock.errors import ConfigError, CorruptFile, NoData
from penstock.order.shuffle import I64
from penstock.read.manifest import CODECS, classify, list_files, tell_apart
from penstock.read.megatron import HEADER, MegatronIndex, index_path, map_file
from penstock.types import FileRef, Span

Ids = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
AnyPath = str | os.PathLike[str]

OPEN_FILES = 256
"""Maps kept open at once. Each holds a file descriptor, of which a process often has 1024."""

_HEADER_BYTES = 256 * 4
_HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c's magic numbers, with their version and type of id: GPT-2 (also modded-nanogpt) and Llama 3."""
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
"""Megatron's codes of integers, and two more that appear in its forks."""
_ENDINGS = (".bin", ".npy")  # what is taken from a folder
_NOT_IDS = (".npz", ".pt", ".pth", ".safetensors", ".arrow", ".zip", ".tar", *CODECS)


class TokenFile(NamedTuple):
    """One file and how to read it: plain values, cheap to send to another process."""

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
    sequences: int = 0
    documents: int = 0
    """For Megatron: entries of its document index, one more than there are documents."""

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def documents_index(self) -> MegatronIndex:
        """For Megatron: where its documents begin."""
        return MegatronIndex(
            self.path,
            self.index_size,
            itemsize=self.itemsize,
            sequences=self.sequences,
            documents=self.documents,
        )


class TokenFileDataset:
    """Files of token ids, memory-mapped, as a map-style dataset of rows of `seq_len + 1` ids."""

    def __init__(self, files: Sequence[TokenFile], seq_len: int, positions: bool = False) -> None:
        """Rows of files that are known already; `from_binary_file` finds out about them."""
        self.positions = bool(positions)
        self.files = files = tuple(files)
        self.seq_len = seq_len = whole_number("seq_len", seq_len, 1)
        counts = [max(0, file.tokens - 1) // seq_len for file in files]
        if sum(counts) == 0:
            longest = max(files, key=lambda file: file.tokens)
            has = f"{longest.path} has {longest.tokens}, the most of {len(files)} files"
            raise NoData(
                f"seq_len={seq_len} needs {seq_len + 1} ids in a file, and {has}. Choose a smaller seq_len."
            )
        self.dtype: np.dtype[Any] = np.dtype(
            np.uint16 if all(file.itemsize <= 2 for file in files) else np.uint32
        )
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._begins = self._ends - np.array(counts, np.int64)
        self._length = int(self._ends[-1])
        # Caches of their own, that know nothing of `self`: a cycle would keep files open until collected.
        self._rows = lru_cache(OPEN_FILES)(lambda number: _map_rows(files[number], seq_len))
        self._index = lru_cache(OPEN_FILES)(lambda number: files[number].documents_index())

    @classmethod
    def from_binary_file(
        cls,
        path: AnyPath | Sequence[AnyPath],
        seq_len: int,
        dtype: Any = "auto",
        *,
        positions: bool = False,
    ) -> TokenFileDataset:
        """Open a file, a folder (its .bin and .npy), a glob, a Megatron prefix, or a list of these.

        What a file is, its content says: a header of llm.c or modded-nanogpt, a numpy array, or an
        .idx beside it, which makes it Megatron's. Any other file is ids and nothing else, as of nanoGPT.

        dtype: the type of the ids of a file that does not say it itself. "auto" takes uint16, which is
            what nanoGPT writes; a file of larger ids needs "uint32". For the other formats it is checked.
        positions: give each batch `positions` and `cu_seqlens`, for attention within Megatron's documents.
        """
        asked = None if isinstance(dtype, str) and dtype == "auto" else _integer(dtype)
        return cls([_inspect(file, asked) for file in _list(path)], seq_len, positions)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, self.seq_len, self.positions)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Ids:
        row: Ids = self.__getitems__([index + len(self) if index < 0 else index])[0]
        return row

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        """The rows at `indices`, as a new array of a row each."""
        plain = (
            isinstance(indices, np.ndarray)
            and indices.dtype == np.int64
            and indices.ndim == 1
            and indices.size > 0
        )
        # The usual case, which should not wait for general rules. Seen as unsigned, a negative number is a huge one.
        if (
            plain
            and len(self.files) == 1
            and int(np.asarray(indices).view(np.uint64).max()) < self._length
        ):
            return self._gather(0, np.asarray(indices))
        groups, count = self._by_file(indices)
        if len(groups) == 1:
            return self._gather(groups[0][0], groups[0][2])
        out = np.empty((count, self.seq_len + 1), self.dtype)
        for number, at, rows in groups:
            out[at] = self._gather(number, rows)
        return out

    def boundaries(self, indices: I64 | Sequence[int]) -> tuple[I64, I64]:
        """Which of the rows at `indices`, and at which id of it, wherever a document begins; not at its first."""
        rows, columns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, at, local in self._by_file(indices)[0]:
            if self.files[number].format == "megatron":
                row, column = self._index(number).boundaries(local * self.seq_len, self.seq_len + 1)
                rows.append(at[row])
                columns.append(column)
        row, column = np.concatenate(rows), np.concatenate(columns)
        order = np.argsort(row, kind="stable")
        return row[order], column[order]

    def spans(self, index: int) -> list[Span]:
        """Where a row comes from: the file, and the number of its first id there as the offset.

        For Megatron a span for each document in it, by its number; else one, by the row's number in its file.
        """
        ((number, _, local),) = self._by_file([index])[0]
        file, row, length = self.files[number], int(local[0]), self.seq_len + 1
        begin = row * self.seq_len
        if file.format != "megatron":
            return [Span(file.name, None, begin, row, (0, length), (0, length))]
        cuts = [0, *self.boundaries([index])[1].tolist(), length]
        documents, starts = self._index(number).documents_at(begin + np.array(cuts[:-1], np.int64))
        return [
            Span(file.name, None, begin + a, doc, (begin + a - start, begin + b - start), (a, b))
            for a, b, doc, start in zip(
                cuts, cuts[1:], documents.tolist(), starts.tolist(), strict=False
            )
        ]

    def data_id(self) -> dict[str, Any]:
        """What a checkpoint knows the data by. A file's folder and its times are left out: a copy is the same data."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(
                repr((file.name, file.size, file.index_size, file.dtype, file.format)).encode()
            )
        tokens = sum(file.tokens for file in self.files)
        return {
            "kind": "tokens",
            "hash": digest.hexdigest()[:16],
            "files": len(self.files),
            "tokens": tokens,
        }

    def settings_id(self) -> dict[str, Any]:
        """What else the rows depend on."""
        return {"seq_len": self.seq_len}

    def _by_file(self, indices: I64 | Sequence[int]) -> tuple[list[tuple[int, I64, I64]], int]:
        """For each file that has some: its number, which of `indices` they are, and their rows in it."""
        asked: I64 = np.asarray(indices).reshape(-1)
        if asked.size == 0:
            return [], 0
        if asked.dtype.kind not in "iu":
            raise ConfigError(f"{indices!r} are no numbers of rows: they are of {asked.dtype}")
        least, most = int(asked.min()), int(asked.max())
        if least < 0 or most >= len(self):
            raise IndexError(
                f"row {least if least < 0 else most}: {self.files[0].path}, … has {len(self)} rows"
            )
        if len(self.files) == 1:
            return [(0, np.arange(asked.size), asked)], asked.size
        # Files too short for a row end where they begin, and are passed over.
        first, last = np.searchsorted(self._ends, (least, most), side="right").tolist()
        if first == last:
            return [(first, np.arange(asked.size), asked - self._begins[first])], asked.size
        number = np.searchsorted(self._ends, asked, side="right")
        order = np.argsort(number, kind="stable")
        files, begins = np.unique(number[order], return_index=True)
        parts = np.split(order, begins[1:])
        return [
            (n, at, asked[at] - self._begins[n])
            for n, at in zip(files.tolist(), parts, strict=True)
        ], asked.size

    def _gather(self, number: int, rows: I64) -> Ids:
        # Of the ways to copy rows that lie apart, indexing a view of overlapping rows was the fastest,
        # and numpy lets go of the GIL for it, also while the kernel reads a page from disk.
        every, limit = self._rows(number)
        ids: Ids = every[rows]
        if limit is not None and ids.max() > limit:
            file, (row, column) = self.files[number], np.argwhere(ids > limit)[0]
            position = int(rows[row]) * self.seq_len + int(column)
            raise CorruptFile(
                f"{file.path}: the id at position {position} is {ids.view(file.dtype)[row, column]}, and ids are 0 to "
                f"{limit}. Is it a file of {np.dtype(file.dtype).name}? If not, name its type: dtype=…"
            )
        return ids.astype(self.dtype, copy=False)


def _map_rows(file: TokenFile, seq_len: int) -> tuple[Ids, int | None]:
    """A view of a file's rows, which overlap by one id; and the largest id allowed, if it could hold larger ones."""
    unsigned = np.dtype(file.dtype.replace("i", "u"))
    # Seen as unsigned, a negative id is one that is too large.
    limit = min(int(np.iinfo(file.dtype).max), 0xFFFFFFFF)
    shape, strides = (
        ((file.tokens - 1) // seq_len, seq_len + 1),
        (seq_len * file.itemsize, file.itemsize),
    )
    rows: Ids = np.ndarray(shape, unsigned, map_file(file.path, file.size), file.offset, strides)
    return rows, limit if limit < np.iinfo(unsigned).max else None


def _list(paths: AnyPath | Sequence[AnyPath]) -> list[FileRef]:
    """The files of ids behind `paths`, each once and with a name of its own."""
    try:
        sources = [
            os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)
        ]
    except TypeError:
        raise ConfigError(f"{paths!r} is no path, folder, glob or list of these") from None
    if not sources:
        raise NoData("no data: the list of paths is empty. Name a file, a folder or a glob.")
    found: dict[str, FileRef] = {}
    for source in sources:
        path = Path(source.removesuffix(".idx")).expanduser()
        if not path.exists() and Path(f"{path}.bin").is_file():
            source = f"{path}.bin"
        folder = path.is_dir()
        for file in list_files(source, format="text", whole=False):
            # A folder holds other things too; what is named, or matches a glob, is taken for ids.
            if file.path.endswith(_ENDINGS) or not (folder or file.path.endswith(".idx")):
                found.setdefault(os.path.realpath(file.path), file)
        if not found:
            raise NoData(
                f"{source} has no file that ends in {' or '.join(_ENDINGS)}. Name the files, or a glob."
            )
    return tell_apart([replace(file, codec="") for file in found.values()])


def _inspect(ref: FileRef, asked: np.dtype[Any] | None) -> TokenFile:
    """What a file of ids is, by its first bytes and what lies beside it."""
    path, size = ref.path, ref.size
    if classify(path) or path.lower().endswith(_NOT_IDS):
        raise ConfigError(
            f"{path} is no file of token ids. Read text with TextDataset; unpack what is compressed."
        )
    if size == 0:
        raise CorruptFile(
            f"{path} is empty. Was the program that writes it stopped? Write it anew, or leave it out."
        )
    with open(path, "rb") as stream:
        head = stream.read(_HEADER_BYTES)
    magic, version, count = struct.unpack("<3i", head[:12]) if len(head) >= 12 else (0, 0, 0)
    file = TokenFile(path, ref.name, "plain", "", size, 0, 0)
    if head.startswith(b"\x93NUMPY"):
        file = _inspect_npy(file)
    elif os.path.isfile(index_path(path)):
        file = _inspect_megatron(file)
    elif magic == 20240522:
        raise ConfigError(
            f"{path} is an evaluation file of llm.c (magic {magic}): questions and answers, not a text."
        )
    elif magic in _HEADERS:
        known, dtype = _HEADERS[magic]
        if version != known:
            raise CorruptFile(
                f"{path}: its header (magic {magic}) is of version {version}; we read version {known}."
            )
        file = file._replace(format="header", dtype=dtype, offset=_HEADER_BYTES, tokens=count)
        if size != (should := _HEADER_BYTES + count * file.itemsize):
            raise CorruptFile(
                f"{path} has a header of {count} ids, so {should} bytes; it has {size}. Get it anew."
            )
    else:
        kind = np.dtype("<u2") if asked is None else asked
        if size % kind.itemsize:
            raise CorruptFile(
                f"{path}: {size} bytes are no whole number of {kind.name}. Is it complete? Name its dtype."
            )
        return file._replace(dtype=kind.str, tokens=size // kind.itemsize)
    if asked is not None and asked != np.dtype(file.dtype):
        raise ConfigError(
            f"dtype={asked.name!r}: {path} holds {np.dtype(file.dtype).name}, as it says. Leave dtype out."
        )
    return file


def _inspect_npy(file: TokenFile) -> TokenFile:
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise CorruptFile(
            f"{file.path} begins like a numpy array but cannot be mapped: {error}"
        ) from error
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{file.path} holds {array.dtype}, and token ids are whole numbers")
    if array.ndim != 1:
        raise ConfigError(
            f"{file.path} is an array of shape {array.shape}, and ids are read from one dimension. If its rows "
            f"are one text, save array.reshape(-1); if each is a sample, give the loader the array itself."
        )
    return file._replace(
        format="npy", dtype=array.dtype.str, offset=array.offset, tokens=array.size
    )


def _inspect_megatron(file: TokenFile) -> TokenFile:
    path = index_path(file.path)
    with open(path, "rb") as stream:
        head = stream.read(HEADER.size)
        size = os.fstat(stream.fileno()).st_size
    if len(head) < HEADER.size or not head.startswith(_MEGATRON):
        raise CorruptFile(
            f"{path}, which begins with {head[:9]!r}, is no whole index of Megatron. Write it anew, or move it."
        )
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_TYPES:
        raise CorruptFile(
            f"{path}: version {version}, type {code}; we read version 1, types {[*_MEGATRON_TYPES]}."
        )
    # Megatron's files with several kinds of data have another byte for each sequence at their end.
    should = HEADER.size + 12 * sequences + 8 * documents
    if size not in (should, should + sequences) or sequences == 0 or documents < 2:
        raise CorruptFile(
            f"{path} lists {sequences} sequences, so takes {should} bytes; it has {size}. Get it anew."
        )
    file = file._replace(
        format="megatron",
        dtype=_MEGATRON_TYPES[code],
        index_size=size,
        sequences=sequences,
        documents=documents,
    )
    if (end := file.documents_index().end()) != file.size:
        raise CorruptFile(
            f"{path} describes a .bin of {end} bytes, and {file.path} has {file.size}. Get both anew."
        )
    return file._replace(tokens=file.size // file.itemsize)


def _integer(dtype: Any) -> np.dtype[Any]:
    """The type that a user named. Files have the lower byte first, unless he says otherwise."""
    try:
        named = np.dtype(dtype)
    except TypeError:
        named = np.dtype(object)
    if dtype is None or named.kind not in "iu":
        raise ConfigError(
            f"dtype={dtype!r}: needs 'auto' or a type of whole numbers, as 'uint16' or 'uint32'"
        )
    little: np.dtype[Any] = named.newbyteorder("<")
    return little if named.byteorder == "=" else named
