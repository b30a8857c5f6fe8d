"""What a setting's value may be, and how it is read from text or taken as it is.

In:    a value as somebody wrote it, and where.
Out:   the value, or an error that says all of that and what would fit.
Where: the thread that creates a loader.
State: none.

Text is read alike wherever it stands, so `"8"` in a file is as good as 8.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

from penstock.errors import ConfigError

MOST_CPUS = 1 << 16


class Said(NamedTuple):
    """A setting, as somebody wrote it."""

    setting: str
    value: Any
    where: str
    """Its source and the name that it has there: "environment NSA_FWE_Q"."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the values of a setting are read and shown. What `show` gives, `read` takes."""

    needs: str
    """What would fit, for the error that says so."""
    read: Callable[[Any], Any]
    """Raises where the value does not fit: a ValueError, TypeError, LookupError or ArithmeticError."""
    show: Callable[[Any], str] = str

    def parse(self, said: Said) -> Any:
        """The value, or an error that names the key as written, its source, the value and what would fit."""
        try:
            return self.read(said.value)
        except (ValueError, TypeError, LookupError, ArithmeticError):
            raise ConfigError(f"{said.where} = {said.value!r}: needs {self.needs}") from None


def whole(least: int) -> Kind:
    """A count."""

    def read(value: Any) -> int:
        number = int(value) if isinstance(value, str) else operator.index(value)
        return number if not isinstance(value, bool) and number >= least else refuse()

    return Kind(f"a whole number, at least {least}", read)


def number(unit: str = "") -> Kind:
    """A measure that is not negative."""

    def read(value: Any) -> float:
        measure = float(value)
        return (
            measure
            if not isinstance(value, bool) and math.isfinite(measure) and measure >= 0
            else refuse()
        )

    return Kind(f"a number{unit and f' of {unit}'}, at least 0", read)


_FLAGS: dict[str | None, bool] = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


def flag() -> Kind:
    """On or off."""

    def read(value: Any) -> bool:
        if isinstance(value, int | str):  # and so a bool
            return _FLAGS[_word(str(value))]
        return refuse()

    return Kind(
        "on or off (true, yes, 1 or false, no, 0)", read, lambda value: "on" if value else "off"
    )


def choice(*words: str, hint: str = "") -> Kind:
    """One of a few words."""

    def read(value: Any) -> str:
        return value if isinstance(value, str) and value in words else refuse()

    return Kind(f"one of {', '.join(map(repr, words))}{hint}", read)


def device_name() -> Kind:
    """Where tensors are: a name, or a `torch.device`, which is taken by its name."""

    def read(value: Any) -> str:
        name = str(value) if isinstance(value, str) or type(value).__name__ == "device" else ""
        return name if name.strip() else refuse()

    return Kind("a device such as 'cpu' or 'cuda:0'", read)


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?i?b)?", re.IGNORECASE | re.ASCII)
_UNITS = {"b": 1} | {f"{k}b": 10 ** (3 * n) for n, k in enumerate("kmgt", 1)}
_UNITS |= {f"{k}ib": 1 << (10 * n) for n, k in enumerate("kmgt", 1)}


def read_size(value: Any) -> int:
    """Bytes, from a number or from text such as "512MiB"."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip()) or refuse()
        size = int(Decimal(match[1]) * _UNITS.get((match[2] or "b").lower(), 0))
    else:
        size = operator.index(value)
    return size if not isinstance(value, bool) and size >= 1 else refuse()


def show_size(size: int) -> str:
    """The largest unit that divides it: "1GiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def byte_size() -> Kind:
    """Memory."""
    return Kind("a number of bytes, or a size such as 512MiB or 2GB", read_size, show_size)


def _read_cpus(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        cpus: list[int] = []
        for part in value.split(","):
            first, dash, last = part.partition("-")
            begin, end = int(first), int(last if dash else first)
            if not 0 <= begin <= end < MOST_CPUS:
                refuse()
            cpus += range(begin, end + 1)
    else:
        cpus = [whole(0).read(cpu) for cpu in ([value] if isinstance(value, int) else value)]
    if not cpus or max(cpus) >= MOST_CPUS:
        refuse()
    return tuple(dict.fromkeys(cpus))


def _show_cpus(cpus: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cpu_list() -> Kind:
    """Which CPUs."""
    return Kind('CPU numbers, as a list or as text such as "0-3,8"', _read_cpus, _show_cpus)


def or_none(kind: Kind, word: str = "none") -> Kind:
    """A kind that may be left open; `word` says so where a language has no null."""

    def read(value: Any) -> Any:
        return None if value is None or _word(value) in ("none", word) else kind.read(value)

    return Kind(
        f"{kind.needs}, or {word!r}",
        read,
        lambda value: word if value is None else kind.show(value),
    )


def or_word(kind: Kind, word: str) -> Kind:
    """A kind with one word besides."""
    return Kind(
        f"{kind.needs}, or {word!r}",
        lambda value: word if _word(value) == word else kind.read(value),
        lambda value: word if value == word else kind.show(value),
    )


def _word(value: Any) -> str | None:
    return value.strip().lower() if isinstance(value, str) else None


def refuse() -> NoReturn:
    """Ends a `read`; `Kind.parse` says what would have fitted."""
    raise ValueError
