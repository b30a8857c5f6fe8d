"""Judge the texts of a chunk one by one, without losing the chunk for one of them.

In:    a column as a file had it: any kind of string or binary, nulls, bytes that may not be UTF-8.
Out:   the same number of texts as large_string; those that cannot be used are empty, and reported.
Where: worker threads.
State: none.
Cost:  one pass to check the encoding (5 GB/s); Python per document only where something is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import BadRecord, ConfigError, CorruptFile
from penstock.read.columns import call, flags, scalar, widened
from penstock.read.delimited import Records
from penstock.types import Address, Bad, Documents, FileRef, OnBadRecord

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Judge:
    """What to do with a record that cannot be used. One for each chunk that is read."""

    policy: OnBadRecord
    max_doc_bytes: int
    bad: list[Bad]

    def reject(self, address: Address, reason: str, detail: str) -> None:
        """Raise, or note the record as left out."""
        if self.policy == "raise":
            raise BadRecord(
                f"{where(address)}: {detail}. Mend the record, or leave such records out: "
                "TextDataset(…, on_bad_record='skip' or 'quarantine:FILE')"
            )
        self.bad.append(Bad(address, reason, detail))

    def reject_chunk(self, address: Address, error: CorruptFile) -> None:
        """The same for a file or chunk that cannot be read at all."""
        if self.policy == "raise":
            # A new one each time: several threads may meet the same damage, each with its own notes.
            raise type(error)(str(error)) from error
        self.bad.append(Bad(address, error.reason, str(error).splitlines()[0]))


def where(address: Address) -> str:
    """An address in words."""
    if address.group is None:
        return f"{address.file}, byte {address.row}" if address.row >= 0 else address.file
    row = f", row {address.row}" if address.row >= 0 else ""
    return f"{address.file}, row group {address.group}{row}"


def reject_cut(file: FileRef, records: Records, judge: Judge) -> None:
    """The last record is too long, by however much."""
    offset = records.offset + int(records.starts[-1])
    detail = f"a record exceeds max_doc_bytes={judge.max_doc_bytes}"
    judge.reject(Address(file.name, None, offset), "too_long", detail)


def clean(
    column: pa.Array, rows: I64, address: Callable[[int], Address], judge: Judge
) -> Documents:
    """Texts that can be tokenized. `address` names the record of an index, where one is rejected."""
    column = widened(column)
    if column.null_count:
        column = call("coalesce", column, scalar(b"", column.type))
    lengths = np.diff(_offsets(column))
    drop = np.flatnonzero(lengths > judge.max_doc_bytes)
    for i in drop.tolist():
        judge.reject(
            address(i),
            "too_long",
            f"a text of {lengths[i]} bytes exceeds max_doc_bytes={judge.max_doc_bytes}",
        )
    column = _blank(column, drop)
    column = _valid_utf8(column, address, judge)
    return Documents(
        column, rows, bad=judge.bad, empty=max(0, count_empty(column) - len(judge.bad))
    )


def count_empty(column: pa.Array) -> int:
    """How many texts have nothing in them."""
    return int(np.count_nonzero(np.diff(_offsets(column)) == 0)) if len(column) else 0


def _offsets(column: pa.Array) -> I64:
    raw = np.frombuffer(column.buffers()[1], np.int64)
    return raw[column.offset : column.offset + len(column) + 1]


def _blank(column: pa.Array, indices: I64) -> pa.Array:
    if len(indices) == 0:
        return column
    keep = np.ones(len(column), bool)
    keep[indices] = False
    return call("if_else", flags(keep), column, scalar(b"", column.type))


def _valid_utf8(column: pa.Array, address: Callable[[int], Address], judge: Judge) -> pa.Array:
    try:
        if pa.types.is_large_string(column.type):
            column.validate(full=True)
            return column
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        pass
    raw = column.cast(pa.large_binary())
    broken = []
    for i, text in enumerate(raw):
        try:
            str(text.as_buffer(), "utf-8")
        except UnicodeDecodeError as error:
            broken.append(i)
            judge.reject(
                address(i),
                "invalid_utf8",
                f"not UTF-8 at byte {error.start} of the text ({error.reason})",
            )
    return _blank(raw, np.array(broken, np.int64)).cast(pa.large_string())


class Quarantine:
    """A JSONL file with the address and the reason of each record that was left out."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write the quarantine file {self._path}: {error.strerror}"
            ) from error

    def write(self, bad: list[Bad]) -> None:
        """Append all of them in a single write, so that a reader never sees half a line."""
        lines = [
            json.dumps({"file": b.address.file, "row_group": b.address.group, "row": b.address.row,
                        "reason": b.reason, "detail": b.detail}, ensure_ascii=False)
            for b in bad
        ]  # fmt: skip
        rest = memoryview(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
