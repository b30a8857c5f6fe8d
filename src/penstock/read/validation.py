"""Turn the records of a chunk into documents: filter, transform, split and validate.

A record that cannot be tokenized raises, or is reported and replaced by an empty text; the other
records keep their row numbers. Checks the encoding in one pass (5 GB/s), and runs Python per document
only for bad records and with `skip`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import ConfigError, CorruptFile, SourceError
from penstock.order.shuffle import I64, mix, mix_array
from penstock.read import ReadSettings
from penstock.read.arrow_utils import booleans, combined, integers, is_text, lengths, scalar
from penstock.types import Address, Bad, ChunkRef, Documents

if TYPE_CHECKING:
    import pyarrow.compute as pc

COMPARISON = re.compile(r"\s*([\w.]+)\s*(==|=|!=|<=|>=|<|>|not in\b|in\b)\s*(.+)", re.DOTALL)

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class ChunkValidator:
    """Validates the records of one chunk, and collects those that are left out."""

    def __init__(self, ref: ChunkRef, settings: ReadSettings) -> None:
        """A chunk with index -1 is the whole file."""
        self._ref, self._settings = ref, settings
        self.max_bytes = settings.max_doc_bytes
        self._group = ref.index if ref.file.format == "parquet" and ref.index >= 0 else None
        self.bad: list[Bad] = []

    def documents(self, table: pa.Table, rows: I64, *, last: bool = False) -> Documents:
        """Return the valid texts of a table; `rows` has the row or offset of each."""
        if (chosen := self._chosen(rows)) is not None:
            table, rows = table.filter(booleans(chosen)), rows[chosen]
        before = len(rows)
        column, rows = select(self._settings, table, rows, self._ref.file.path)
        if column.null_count:
            column = column.fill_null(scalar(b"", column.type))
        sizes = lengths(column)
        too_long = np.flatnonzero(sizes > self.max_bytes)
        for i in too_long.tolist():
            detail = f"a text of {sizes[i]} bytes exceeds max_doc_bytes={self.max_bytes}"
            self.reject(int(rows[i]), "too_long", detail)
        column = blank(column, too_long)
        try:
            if column.type == pa.large_string():
                column.validate(full=True)
            else:
                column = column.cast(pa.large_string())
        except pa.ArrowInvalid:
            column = self._blank_invalid(column.cast(pa.large_binary()), rows)
        n_empty = int(np.count_nonzero(lengths(column) == 0)) - len(self.bad)
        if skip := self._settings.skip:
            skipped = [self._address(row) in skip for row in rows.tolist()]
            column = blank(column, np.flatnonzero(skipped))
        return Documents(column, rows, last, self.bad, max(0, n_empty), before - len(rows))

    def no_documents(self, *, last: bool = False) -> Documents:
        return Documents(pa.nulls(0, pa.large_string()), np.empty(0, np.int64), last, self.bad)

    def reject(self, row: int, reason: str, detail: str) -> None:
        """Raise, or report a record as left out, if it is in the chosen split."""
        chosen = self._chosen(np.array([row]))
        if chosen is not None and not chosen.all():
            return
        address = self._address(row)
        if self._settings.on_bad_record == "raise":
            raise SourceError(
                f"{where(address)}: {detail}. Correct the record, or leave such records out: "
                "TextDataset(…, on_bad_record='skip' or 'quarantine:FILE')"
            )
        self.bad.append(Bad(address, reason, detail))

    def reject_chunk(self, error: CorruptFile) -> None:
        """The same for a file or chunk that cannot be read."""
        if self._settings.on_bad_record == "raise":
            # A new exception, because several threads may find the same damage and add their notes.
            raise type(error)(str(error)) from error
        address = Address(self._ref.file.name, self._group, -1)
        self.bad.append(Bad(address, error.reason, str(error).splitlines()[0]))

    def _blank_invalid(self, column: pa.Array, rows: I64) -> pa.Array:
        invalid = []
        for i, text in enumerate(column):
            try:
                str(text.as_buffer(), "utf-8")
            except UnicodeDecodeError as error:
                invalid.append(i)
                detail = f"not UTF-8 at byte {error.start} of the text ({error.reason})"
                self.reject(int(rows[i]), "invalid_utf8", detail)
        return blank(column, np.array(invalid, np.int64)).cast(pa.large_string())

    def _chosen(self, rows: I64) -> Mask | None:
        """Return a mask of the rows in the chosen split, by document address; None for all."""
        file, settings = self._ref.file, self._settings
        if settings.split is None:
            return None
        hashed = mix_array(self._split_key(file.name), rows)
        if file.members:
            keys = [self._split_key(file.members[i].name) for i in rows.tolist()]
            hashed = np.array(keys, np.uint64)
        in_val: Mask = hashed < np.uint64(int(settings.val_fraction * 2**64))
        return in_val if settings.split == "val" else ~in_val

    def _split_key(self, name: str) -> int:
        # Uses the file's base name: a relative name would change with the other files listed, and an
        # absolute path if the data moves.
        digest = hashlib.sha256(os.path.basename(name).encode("utf-8", "surrogateescape")).digest()
        group = -1 if self._group is None else self._group
        return mix(self._settings.split_seed, group, int.from_bytes(digest[:8], "little"))

    def _address(self, row: int) -> Address:
        if members := self._ref.file.members:
            return Address(members[row].name, None, 0)
        return Address(self._ref.file.name, self._group, row)


def where(address: Address) -> str:
    """Return an address as text."""
    if address.group is None:
        return f"{address.file}, byte {address.row}" if address.row >= 0 else address.file
    row = f", row {address.row}" if address.row >= 0 else ""
    return f"{address.file}, row group {address.group}{row}"


def blank(column: pa.Array, indices: I64) -> pa.Array:
    """Replace texts by empty ones."""
    if len(indices) == 0:
        return column
    import pyarrow.compute as pc

    keep = np.ones(len(column), bool)
    keep[indices] = False
    return pc.if_else(booleans(keep), column, scalar(b"", column.type))


class Quarantine:
    """A JSONL file with the address and the reason of each record that was left out."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = os.path.abspath(path)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror} (quarantine)") from error

    def write(self, bad: list[Bad]) -> None:
        """Append all records in a single write, so that a reader never sees half a line."""
        names = ("file", "row_group", "row", "reason", "detail")
        values = [zip(names, (*b.address, b.reason, b.detail), strict=True) for b in bad]
        self._file.write("".join(json.dumps(dict(v), ensure_ascii=False) + "\n" for v in values))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


# Filters and transforms


def parse_filter(value: Any) -> pc.Expression:
    """Parse a filter: an expression, tuples, or comparisons as text."""
    import pyarrow.compute as pc

    if isinstance(value, pc.Expression):
        return value
    try:
        every = [value] if isinstance(value, str) else list(value)
        if all(isinstance(each, str) or isinstance(each[0], str) for each in every):
            every = [every]  # one conjunction
        return pq.filters_to_expression([[_comparison(each) for each in some] for some in every])
    except (TypeError, ValueError, LookupError, pa.ArrowException) as error:
        needs = "a pyarrow expression, tuples such as [('score', '>=', 3)], or 'score >= 3'"
        raise ConfigError(f"filter={value!r:.200}: must be {needs} ({error})") from error


def filter_columns(wanted: pc.Expression, schema: pa.Schema, where: str) -> list[str]:
    """Return the columns that a filter reads, or raise if one does not exist."""
    table, needed = schema.empty_table(), []
    filter_rows(wanted, table, where)
    for name in schema.names:
        try:
            table.drop_columns([name]).filter(wanted)
        except pa.ArrowException:
            needed.append(name)
    return needed


def filter_rows(wanted: pc.Expression, table: pa.Table, where: str) -> I64:
    """Return the numbers of the rows to keep."""
    numbered = table.append_column("__row", integers(np.arange(len(table))))
    try:
        return np.asarray(numbered.filter(wanted).column("__row"))
    except pa.ArrowException as error:
        why = str(error).partition(" in ")[0].partition("\n")[0]
        names = ", ".join(table.column_names)
        raise ConfigError(f"filter {wanted}: {why}. {where} has the columns {names}.") from error


def filter_groups(wanted: pc.Expression, meta: pq.FileMetaData) -> set[int]:
    """Return the row groups whose statistics do not rule out a match."""
    import pyarrow.dataset as ds

    sink = pa.BufferOutputStream()
    meta.write_metadata_file(sink)
    fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(sink.getvalue()))
    return {group.id for group in fragment.subset(wanted).row_groups}


def _comparison(value: Any) -> tuple[str, str, Any]:
    if not isinstance(value, str):
        name, symbol, value = value
        return name, symbol, value
    if (match := COMPARISON.fullmatch(value)) is None:
        raise ValueError(f"{value!r} is not a comparison")
    name, symbol, text = match.groups()
    try:
        return name, symbol, ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return name, symbol, text.strip()  # a word without quotes


def select(settings: ReadSettings, table: pa.Table, rows: I64, where: str) -> tuple[pa.Array, I64]:
    """Return the texts that pass the filter and the transform, and their rows."""
    if settings.filter is not None and len(rows):
        kept = filter_rows(settings.filter, table, where)
        table, rows = table.take(integers(kept)), rows[kept]
    if settings.transform is None or not len(rows):
        return combined(table.column(settings.text_field)), rows
    name, function = settings.transform
    # One type for texts of all formats: Arrow's functions do not mix them.
    kinds = [pa.string() if is_text(each.type) else each.type for each in table.schema]
    made = function(table.cast(pa.schema(zip(table.column_names, kinds, strict=True))))
    column = pa.chunked_array([made]) if isinstance(made, pa.Array) else made
    kind, n = getattr(column, "type", None), len(table)
    if not isinstance(kind, pa.DataType) or not is_text(kind) or len(column) != n:
        needs = f"must return a text for each of {n} rows, not {kind or type(column).__name__}"
        raise SourceError(f"{where}: transform {name!r} {needs}")
    texts = combined(column)  # null: leave out
    return texts.drop_null(), rows[texts.is_valid().to_numpy(zero_copy_only=False)]
