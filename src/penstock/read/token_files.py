"""Rows of ids from tokenized files (nanoGPT, llm.c, Megatron, numpy), or random ones.

A file of n ids gives (n - 1) // seq_len rows of seq_len + 1 ids. Neighbours overlap by one id,
because the last id of a row is only a target. No row crosses files. Files are memory-mapped; a row
is found by its number and copied once (16 rows of 1024 in 10 µs), without the GIL.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.config import whole_number
from penstock.errors import ConfigError, CorruptFile, SourceError
from penstock.order.shuffle import I64, mix, mix_array
from penstock.read.listing import distinct, list_files, source_paths
from penstock.types import FileRef, Span

Ids = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

TYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c's magic numbers, with version and id type: GPT-2 (also modded-nanogpt) and Llama 3."""
HEADER_BYTES = 256 * 4
MEGATRON = struct.Struct("<9sQBQQ")
"""Magic, version, id type, number of sequences, entries of the document index."""
MEGATRON_TYPES = {4: "<i4", 5: "<i8", 8: "<u2"}
ENDINGS = (".bin", ".npy")


class TokenFile(NamedTuple):
    """A file and its layout, as plain values that are cheap to pickle."""

    path: str
    name: str
    format: Literal["plain", "header", "megatron", "npy"]
    dtype: str
    """The stored type of the ids, in numpy's notation."""
    size: int
    offset: int
    """The byte offset of the first id."""
    tokens: int
    index_size: int = 0
    """The size of Megatron's .idx in bytes."""


class RowDataset:
    """Base class of map-style datasets of rows of `seq_len + 1` ids."""

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
        """Return the row and the column of each document boundary inside the rows at `indices`."""
        self._checked(indices)
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def settings_id(self) -> dict[str, Any]:
        """Return the settings that the rows depend on."""
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
        self, path: Paths, seq_len: int, dtype: Any = "auto", *, positions: bool = False
    ) -> None:
        """Open a file, a folder, a glob, a Megatron prefix, or a list of these: .bin and .npy.

        The format is detected: a header of llm.c or modded-nanogpt, a numpy array, or Megatron if
        there is an .idx next to the file. Any other file contains only ids, as nanoGPT writes.

        dtype: the type of the ids in a file without a header. "auto" is uint16, as nanoGPT
            writes; larger ids need "uint32". Other formats must match it.
        positions: add positions and document masks to batches, from Megatron's documents.
        """
        asked = _type_name(dtype)
        self.files = files = tuple(_inspect(file, asked) for file in _list(path))
        self.seq_len, self.positions = whole_number("seq_len", seq_len, 1), bool(positions)
        counts = np.array([max(0, file.tokens - 1) // seq_len for file in files], np.int64)
        if counts.sum() == 0:
            longest = max(files, key=lambda file: file.tokens)
            raise SourceError(
                f"seq_len={seq_len} needs {seq_len + 1} ids in a file, but {longest.path}, the "
                f"longest of {len(files)}, has {longest.tokens}. Choose a smaller seq_len."
            )
        narrow = all(file.dtype == "<u2" for file in files)
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if narrow else np.uint32)
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self._rows: dict[int, Ids] = {}
        self._documents: dict[int, I64] = {}

    @classmethod
    def from_binary_file(
        cls, path: Paths, seq_len: int, dtype: Any = "auto", *, positions: bool = False
    ) -> TokenFileDataset:
        """Open files. The same as `TokenFileDataset(path, seq_len, …)`."""
        return cls(path, seq_len, dtype, positions=positions)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": {}, "_documents": {}}  # a copy maps the files again

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"TokenFileDataset({self.files[0].path}, {len(self.files)} files)"

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        asked = self._checked(indices)
        # Files too short for a row are empty intervals, which the search skips.
        numbers = np.searchsorted(self._ends, asked, side="right")
        rows = asked - self._begins[numbers]
        found = np.unique(numbers).tolist()
        if len(found) == 1:
            return self._gather(found[0], rows)
        out = np.empty((len(asked), self.seq_len + 1), self.dtype)
        for number in found:
            at = numbers == number
            out[at] = self._gather(number, rows[at])
        return out

    def boundaries(self, indices: I64 | Sequence[int]) -> tuple[I64, I64]:
        cuts = [self._locate(index)[2] for index in self._checked(indices).tolist()]
        rows = np.repeat(np.arange(len(cuts)), list(map(len, cuts)))
        return rows, np.concatenate([np.empty(0, np.int64), *cuts])

    def spans(self, index: int) -> list[Span]:
        """Return the origin of a row. The offset is the number of its first id in the file.

        Megatron rows have a span for each document, with its number; other rows have one span, with
        the row's number in its file.
        """
        number, begin, cuts = self._locate(int(self._checked([index])[0]))
        file, length, spans = self.files[number], self.seq_len + 1, []
        if file.format != "megatron":
            row = begin // self.seq_len
            return [Span(file.name, None, begin, row, (0, length), (0, length))]
        starts = self._documents[number]
        for a, b in itertools.pairwise([0, *cuts.tolist(), length]):
            document = int(np.searchsorted(starts, begin + a, side="right")) - 1
            first = begin + a - int(starts[document])
            spans.append(Span(file.name, None, begin + a, document, (first, first + b - a), (a, b)))
        return spans

    def data_id(self) -> dict[str, Any]:
        """Return the fields of a state that identify the data. They do not depend on the folder."""
        known = [(f.name, f.size, f.index_size, f.dtype, f.format) for f in self.files]
        found = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        tokens = sum(file.tokens for file in self.files)
        return {"kind": "tokens", "hash": found, "files": len(self.files), "tokens": tokens}

    def _locate(self, index: int) -> tuple[int, int, I64]:
        """Return the file of a row, its first id there, and the columns of document boundaries."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        begin = (index - int(self._begins[number])) * self.seq_len
        if self.files[number].format != "megatron":
            return number, begin, np.empty(0, np.int64)
        if number not in self._documents:
            self._documents[number] = MegatronIndex(self.files[number]).documents()
        starts = self._documents[number]
        first, last = np.searchsorted(starts, [begin + 1, begin + self.seq_len + 1])
        return number, begin, np.unique(starts[first:last]) - begin  # empty documents count once

    def _gather(self, number: int, rows: I64) -> Ids:
        file = self.files[number]
        if (every := self._rows.get(number)) is None:
            # A view of overlapping rows. Indexing it is the fastest copy, and releases the GIL.
            kind = np.dtype(file.dtype)
            shape = (file.tokens - 1) // self.seq_len, self.seq_len + 1
            strides = self.seq_len * kind.itemsize, kind.itemsize
            data = _map_file(file.path, file.size)
            every = self._rows[number] = np.ndarray(shape, kind, data, file.offset, strides)
        ids: Ids = every[rows]
        if file.dtype in ("<i4", "<i8") and not 0 <= ids.min() <= ids.max() <= 0xFFFFFFFF:
            raise CorruptFile(
                f"{file.path}: ids from {ids.min()} to {ids.max()} in the rows {rows.tolist()}, not "
                f"0 to {0xFFFFFFFF}. If they are not {file.dtype}, pass their type: dtype=…"
            )
        return ids.astype(self.dtype, copy=False)


def _map_file(path: str, size: int) -> pa.Buffer:
    """Map a file that had `size` bytes when it was inspected. Closes its descriptor."""
    with pa.memory_map(os.fsencode(path)) as file:
        # Reading beyond the end of a mapped file kills the process, so the size is checked.
        if (now := file.size()) != size:
            raise CorruptFile(f"{path} changed from {size} to {now} bytes. Start a new run.")
        return file.read_buffer(size)


class MegatronIndex:
    """A mapped Megatron .idx, with the first byte of sequences and first sequence of documents."""

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
            sizes = f"takes {should} bytes; it has {len(data)}"
            raise CorruptFile(f"{path} lists {n} sequences, so {sizes}")
        self.dtype = MEGATRON_TYPES[code]
        self._itemsize = np.dtype(self.dtype).itemsize
        self._pointers = np.frombuffer(data, "<i8", n, at + 4 * n)
        self._firsts = np.frombuffer(data, "<i8", documents, at + 12 * n)
        last = int(np.frombuffer(data, "<i4", n, at)[-1])
        end = int(self._pointers[-1]) + last * self._itemsize
        if end != file.size:
            raise CorruptFile(f"{path} describes {end} bytes, but {file.path} has {file.size}")
        self.tokens = end // self._itemsize

    def documents(self) -> I64:
        """Return the first id of each document. Takes 8 bytes per document."""
        if not 0 <= self._firsts.min() <= self._firsts.max() <= self._pointers.size:
            raise CorruptFile(f"{self._path}: a document begins with a sequence that is not there")
        starts: I64 = np.append(self._pointers // self._itemsize, self.tokens)[self._firsts[:-1]]
        return starts


def _index_path(path: str) -> str:
    return os.path.splitext(path)[0] + ".idx"


def _list(paths: Paths) -> list[FileRef]:
    """Return the files of ids at `paths`, without duplicates and with distinct names."""
    found: list[FileRef] = []
    for source in source_paths(paths):
        prefix = Path(source.removesuffix(".idx")).expanduser()
        if not prefix.exists() and Path(f"{prefix}.bin").is_file():
            source = f"{prefix}.bin"
        listed = list_files(source, format="text", whole=False)
        found += [replace(file, codec="") for file in listed if file.path.endswith(ENDINGS)]
    if not found:
        raise SourceError(f"{paths}: no .bin or .npy file. Read text with TextDataset.")
    return distinct(found)


def _inspect(ref: FileRef, asked: str) -> TokenFile:
    """Detect a file's format from its first bytes and its .idx, if there is one."""
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
            needs = f"needs {should} bytes and version {known}; it has {size} bytes"
            raise CorruptFile(f"{path} has a header of {count} ids, version {version}: {needs}.")
    elif size == 0 or size % np.dtype(kind).itemsize:
        raise CorruptFile(f"{path}: {size} bytes are not whole ids of type {kind}. Is it complete?")
    if asked != "auto" and TYPES[asked] != file.dtype:
        raise ConfigError(f"dtype={asked!r}: {path} holds {file.dtype}. Leave dtype out.")
    return file


def _inspect_npy(file: TokenFile) -> TokenFile:
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise CorruptFile(f"{file.path} is not an array to map: {error}") from error
    kind = array.dtype.str
    if kind not in TYPES.values() or array.ndim != 1:
        holds = f"{array.dtype} of shape {array.shape}, not {', '.join(TYPES)} in one dimension"
        raise ConfigError(f"{file.path} holds {holds}. Save array.reshape(-1), or load the array.")
    return file._replace(format="npy", dtype=kind, offset=array.offset, tokens=array.size)


def _type_name(dtype: Any) -> str:
    with suppress(TypeError):  # unknown to numpy
        name = "auto" if str(dtype) == "auto" else np.dtype(dtype).name
        if name in ("auto", *TYPES):
            return name
    raise ConfigError(f"dtype={dtype!r}: needs 'auto' or one of {', '.join(TYPES)}")


class SyntheticDataset(RowDataset):
    """A map-style dataset of `num_samples` rows of `seq_len + 1` random ids below `vocab_size`."""

    def __init__(
        self, vocab_size: int = 50257, seq_len: int = 1024, num_samples: int = 10000, seed: int = 42
    ) -> None:
        """Rows are generated on access."""
        self.vocab_size = whole_number("vocab_size", vocab_size, 1)
        self.seq_len = whole_number("seq_len", seq_len, 1)
        self.num_samples = whole_number("num_samples", num_samples, 1)
        self.seed = whole_number("seed", seed, 0)
        if self.vocab_size > 1 << 32:
            raise ConfigError(f"vocab_size={vocab_size}: ids have 32 bits, so at most {1 << 32}")
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def __repr__(self) -> str:
        sizes = f"vocab_size={self.vocab_size}, seq_len={self.seq_len}"
        return f"SyntheticDataset({sizes}, num_samples={self.num_samples}, seed={self.seed})"

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: I64 | Sequence[int]) -> Ids:
        keys = mix_array(mix(self.seed), self._checked(indices))
        x = mix_array(0, np.add.outer(keys, np.arange(self.seq_len + 1, dtype=np.uint64)))
        # The upper 32 bits, scaled to the vocabulary.
        scaled = (x >> np.uint64(32)) * np.uint64(self.vocab_size) >> np.uint64(32)
        return scaled.astype(self.dtype)

    def spans(self, index: int) -> list[Span]:
        """Return the origin of a row: its number."""
        row, length = int(self._checked([index])[0]), self.seq_len + 1
        return [Span("synthetic", None, None, row, (0, length), (0, length))]

    def data_id(self) -> dict[str, Any]:
        """Return the fields of a state that identify the data."""
        sizes = {"vocab_size": self.vocab_size, "num_samples": self.num_samples}
        return {"kind": "synthetic", "seed": self.seed, **sizes}
