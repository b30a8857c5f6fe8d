"""Choose rows by other columns, and make texts of them, before anything is tokenized."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import ConfigError, SourceError
from penstock.order.shuffle import I64
from penstock.read import ReadSettings
from penstock.read.arrow_utils import combined, integers, is_text

COMPARISON = re.compile(r"\s*([\w.]+)\s*(==|=|!=|<=|>=|<|>|not in\b|in\b)\s*(.+)", re.DOTALL)
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class RowFilter:
    """Rows to keep."""

    expression: pc.Expression
    alternatives: tuple[tuple[tuple[str, str, Any], ...], ...] = ()
    """The same as comparisons, if it was given so: one of these conjunctions has to hold."""

    @classmethod
    def of(cls, value: Any) -> RowFilter | None:
        """Return the filter that a user gave: an expression, tuples, or comparisons as text."""
        if value is None or isinstance(value, pc.Expression):
            return None if value is None else cls(value)
        try:
            every = [value] if isinstance(value, str) else list(value)
            if all(isinstance(each, str) or isinstance(each[0], str) for each in every):
                every = [every]  # one conjunction
            alternatives = [[_comparison(each) for each in some] for some in every]
            return cls(pq.filters_to_expression(alternatives), tuple(map(tuple, alternatives)))
        except (TypeError, ValueError, LookupError, pa.ArrowException) as error:
            needs = "a pyarrow expression, tuples such as [('score', '>=', 3)], or 'score >= 3'"
            raise ConfigError(f"filter={value!r:.200}: must be {needs} ({error})") from error

    def __str__(self) -> str:
        return str(self.expression)

    def columns(self, schema: pa.Schema, where: str) -> list[str]:
        """Return the columns that the filter reads, or raise if there is none of a name."""
        table, needed = schema.empty_table(), []
        self.rows(table, where)
        for name in schema.names:
            try:
                table.drop_columns([name]).filter(self.expression)
            except pa.ArrowException:
                needed.append(name)
        return needed

    def rows(self, table: pa.Table, where: str) -> I64:
        """Return the numbers of the rows to keep."""
        numbered = table.append_column("__row", integers(np.arange(len(table))))
        try:
            return np.asarray(numbered.filter(self.expression).column("__row"))
        except pa.ArrowException as error:
            why = str(error).partition(" in ")[0].partition("\n")[0]
            names = ", ".join(table.column_names)
            raise ConfigError(f"filter {self}: {why}. {where} has the columns {names}.") from error

    def may_match(self, group: pq.RowGroupMetaData) -> bool:
        """Return False if the statistics of a row group rule out a match."""
        columns = [group.column(i) for i in range(group.num_columns)]
        known = {column.path_in_schema: column.statistics for column in columns}
        possible = [all(_possible(known.get(name), *rest) for name, *rest in some) for some in self.alternatives]  # fmt: skip
        return not possible or any(possible)


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


def _possible(known: Any, symbol: str, value: Any) -> bool:
    # Only numbers: texts may be cut short in statistics.
    if known is None or not known.has_min_max or not isinstance(value, int | float):
        return True
    if symbol in ("=", "=="):
        return bool(known.min <= value <= known.max)
    extreme = known.min if symbol.startswith("<") else known.max
    return symbol not in ORDER or bool(ORDER[symbol](extreme, value))


def select(settings: ReadSettings, table: pa.Table, rows: I64, where: str) -> tuple[pa.Array, I64]:
    """Return the texts that pass the filter and the transform, and their rows."""
    if settings.filter is not None and len(rows):
        kept = settings.filter.rows(table, where)
        table, rows = table.take(integers(kept)), rows[kept]
    if settings.transform is None or not len(rows):
        return combined(table.column(settings.text_field)), rows
    texts = combined(_transformed(*settings.transform, table, where))
    return texts.drop_null(), rows[texts.is_valid().to_numpy(zero_copy_only=False)]


def _transformed(
    name: str, function: Callable[[pa.Table], Any], table: pa.Table, where: str
) -> pa.ChunkedArray:
    """Return the texts that a user's function makes of a table; null for those to leave out."""
    # One type for texts of all formats: Arrow's functions do not mix them.
    kinds = [pa.string() if is_text(each.type) else each.type for each in table.schema]
    texts = function(table.cast(pa.schema(zip(table.column_names, kinds, strict=True))))
    column = pa.chunked_array([texts]) if isinstance(texts, pa.Array) else texts
    kind, n = getattr(column, "type", None), len(table)
    if not isinstance(kind, pa.DataType) or not is_text(kind) or len(column) != n:
        needs = f"must return a text for each of {n} rows, not {kind or type(column).__name__}"
        raise SourceError(f"{where}: transform {name!r} {needs}")
    return column
