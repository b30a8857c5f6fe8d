"""Every option, written once: its type, default, bounds and what it does.

`LoaderOptions`, `TextOptions` and `RemoteOptions` are frozen dataclasses. `option()` adds bounds and
a help text to a field; values are checked against annotation and bounds when an object is made.
Signatures, docstrings, settings files, environment variables and `penstock config` derive from them.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

from penstock.errors import ConfigError
from penstock.types import AUTO, Format, GiB, KiB, MiB, Packing, Shard

T = TypeVar("T")
P = ParamSpec("P")
Owner = TypeVar("Owner")
First = TypeVar("First")

MAX_CPUS = 1 << 16
REFUSED = (ValueError, TypeError, LookupError, ArithmeticError)

# Declaring options


def option(*, help: str, default: Any = MISSING, **about: Any) -> Any:
    """Declare an option as a dataclass field; `about` has further fields of `Option`."""
    return field(default=default, metadata={"help": help, **about})


@typing.dataclass_transform(frozen_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that checks and normalises every field when it is created."""

    def check_all(self: Any) -> None:
        for each in made.__options__.values():
            object.__setattr__(self, each.name, each.check(getattr(self, each.name)))

    made: Any = cls
    made.__post_init__ = check_all
    dataclass(frozen=True)(made)
    hints = typing.get_type_hints(made)
    made.__options__ = {
        each.name: Option(each.name, hints[each.name], each.default, **each.metadata)
        for each in fields(made)
    }
    return cls


def options_of(cls: Any) -> Mapping[str, Option]:
    """Return the options that a class declares, by name."""
    declared: Mapping[str, Option] = cls.__options__
    return declared


@dataclass(frozen=True)
class Option:
    """A declared option: what it accepts, and how its values are read from text and shown."""

    name: str
    hint: Any
    default: Any
    help: str
    """What it does, and what a larger value costs."""
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    """Bounds of a number; `above` and `below` are exclusive."""
    size: bool = False
    """A number of bytes; as text also "512MiB"."""
    none: str = "none"
    """The text that means None."""
    pattern: str = ".+"
    """What a text must match."""
    group: str = ""
    implied: str | None = None
    """The command line's heading, and the option's meaning without a value."""

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The alternatives of the annotation; None comes first."""
        union = get_origin(self.hint) in (typing.Union, types.UnionType)
        kinds = get_args(self.hint) if union else (self.hint,)
        return tuple(sorted(kinds, key=lambda kind: kind is not type(None)))

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are accepted literally."""
        return tuple(word for kind in self.kinds for word in get_args(kind) if _is_literal(kind))

    @property
    def has_text(self) -> bool:
        """Whether a value can be written as text."""
        return not any(kind is Shard or get_origin(kind) is Callable_ for kind in self.kinds)

    def check(self, value: Any) -> Any:
        """Return the value, normalised, or raise ConfigError with the name, value and what fits."""
        return self._read(value, False, f"{self.name}={value!r}")

    def read(self, value: Any, where: str) -> Any:
        """Return a value written at `where`: text is parsed unless the option accepts text."""
        parse = isinstance(value, str) and str not in self.kinds
        return self._read(value.strip() if parse else value, parse, f"{where} = {value!r}")

    def show(self, value: Any) -> str:
        """Return the value as text that `read` takes back."""
        if value is None or value is MISSING:
            return self.none
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return _show_size(value) if self.size else str(value)

    def _read(self, value: Any, text: bool, where: str) -> Any:
        for kind in self.kinds:
            try:
                return self._read_as(kind, value, text)
            except REFUSED:
                continue
        raise ConfigError(f"{where}: must be {self.needs(text)}")

    def _read_as(self, kind: Any, value: Any, text: bool) -> Any:
        if kind is type(None):
            return _require(value is None or (text and value.lower() in ("none", self.none)), None)
        if _is_literal(kind):
            word = value.lower() if text else value
            return _require(isinstance(word, str) and word in get_args(kind), word)
        if kind is bool:
            return FLAGS[value.lower()] if text else _require(isinstance(value, bool), value)
        if kind is int or kind is float:
            return self._read_number(kind, value, text)
        if kind == Iterable[int]:
            return _read_cpus(value)
        if kind is Path:
            return Path(value).expanduser()
        if kind is str:
            return _require(re.fullmatch(self.pattern, value, re.DOTALL) is not None, value)
        if get_origin(kind) is Callable_:
            return _require(callable(value), value)
        return _require(kind is Any or isinstance(value, get_origin(kind) or kind), value)

    def _read_number(self, kind: type, value: Any, text: bool) -> Any:
        _require(not isinstance(value, bool) and (text or not isinstance(value, str)), value)
        if self.size and text:
            number: Any = read_size(value)
        elif kind is int:
            number = int(value) if text else operator.index(value)
        else:
            number = float(value)
        fits = (
            math.isfinite(number)
            and (self.minimum is None or number >= self.minimum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )
        return _require(fits, number)

    def needs(self, text: bool = False) -> str:
        """Say what would fit."""
        parts = [part for kind in self.kinds if (part := self._needs(kind, text))]
        return ", or ".join([*parts[1:], parts[0]] if self.kinds[0] is type(None) else parts)

    def _needs(self, kind: Any, text: bool) -> str:
        if kind is type(None):
            return f"'{self.none}'" if text else "None"
        if _is_literal(kind):
            words = [repr(word) for word in get_args(kind)]
            return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
        if kind is int or kind is float:
            bounds = [(" ≥", self.minimum), (" >", self.above), (" <", self.below)]
            limits = " and".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
            unit = " of bytes (or a size such as 512MiB)" if self.size else ""
            return f"{'an integer' if kind is int and not unit else 'a number'}{unit}{limits}"
        if kind is str and self.pattern != ".+":
            return f"text that matches {self.pattern}"
        origin = get_origin(kind) or kind
        return NAMES.get(kind) or NAMES.get(origin) or f"a value of type {origin.__name__}"


Callable_ = get_origin(Callable[..., Any])
NAMES: dict[Any, str] = {
    bool: "True or False",
    str: "text",
    bytes: "bytes",
    Path: "a path",
    Any: "anything",
    Callable_: "a function",
    Iterable[int]: "CPU numbers such as [0, 1] or '0-3,8'",
}
FLAGS = dict.fromkeys(("1", "true", "on", "yes"), True)
FLAGS |= dict.fromkeys(("0", "false", "off", "no"), False)


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _require(fits: bool, value: T) -> T:
    if not fits:
        raise ValueError
    return value


SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
UNITS = {"": 1} | {unit: 10 ** (3 * n) for n, unit in enumerate("kmgt", 1)}
UNITS |= {f"{unit}i": 1 << (10 * n) for n, unit in enumerate("kmgt", 1)}


def read_size(text: str) -> int:
    """Return the bytes of a text such as "512MiB", "2 GB" or "1024"."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


def _show_size(size: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def _read_cpus(value: Any) -> tuple[int, ...]:
    """Return the CPUs of a list, of a number, or of a text such as "0-3,8"."""
    if isinstance(value, str):
        ranges = [part.partition("-") for part in value.split(",")]
        cpus = [cpu for a, dash, b in ranges for cpu in range(int(a), int(b if dash else a) + 1)]
    else:
        cpus = [operator.index(cpu) for cpu in ([value] if isinstance(value, int) else value)]
    return _require(
        bool(cpus) and min(cpus) >= 0 and max(cpus) < MAX_CPUS, tuple(dict.fromkeys(cpus))
    )


# Signatures


def accepts(
    cls: Callable[P, Any],
) -> Callable[
    [Callable[Concatenate[Owner, First, ...], None]], Callable[Concatenate[Owner, First, P], None]
]:
    """Give an `__init__(self, first, *args, **kwargs)` the signature and help of an options class."""

    def decorate(init: Callable[Concatenate[Owner, First, ...], None]) -> Any:
        own = list(inspect.signature(init).parameters.values())[:2]
        declared = list(inspect.signature(cls).parameters.values())
        init.__signature__ = inspect.Signature([*own, *declared])  # type: ignore[attr-defined]
        helps = [f"{each.name}: {each.help}" for each in options_of(cls).values()]
        init.__doc__ = "\n".join([inspect.cleandoc(init.__doc__ or ""), *helps])
        return init

    return decorate


# The options


@options
class LoaderOptions:
    """How a loader runs."""

    batch_size: int = option(
        minimum=1, help="Rows of a batch on this rank. More take memory, in the queue too."
    )
    shuffle: bool | None = option(
        default=None,
        none="auto",
        help="A new order in each epoch. Defaults to True for map-style data, False for streams. "
        "Text is shuffled within windows, which take memory.",
    )
    seed: int = option(default=0, minimum=0, help="The order to use. Costs nothing.")
    n_workers: int | None = option(
        default=None,
        minimum=0,
        none="auto",
        help="Workers that read and tokenize; 0: `next()` makes each batch. Defaults to this rank's "
        "share of the cores. Each holds a chunk in memory.",
    )
    prefetch_size: int | Literal["auto"] = option(
        default=8,
        minimum=1,
        help="Batches in the queue. More hide longer hiccups and take memory, 16 bytes a token. "
        '"auto" starts at 8; workers, requests, read-ahead and queue then follow measurements.',
    )
    device: Any | None = option(
        default=None,
        help='Where batches are copied, such as "cuda", ahead of their step. Takes device memory.',
    )
    _: KW_ONLY
    shard: Shard | None = option(
        default=None,
        help="This reader's part. Defaults to this rank's. An explicit shard disables coordination "
        "between ranks, which may then get different numbers of batches.",
    )
    lanes: int | None = option(
        default=None,
        minimum=1,
        none="auto",
        help="Independent sequences, dealt to ranks. A state loads on every world size that divides "
        "them. Defaults to the first world size. Each has a shuffle window in memory.",
    )
    epochs: int | None = option(
        default=None, minimum=1, help="Passes over the data. Defaults to an endless stream."
    )
    drop_last: bool | None = option(
        default=None,
        none="auto",
        help="End a finite stream with its last full batch. Defaults to True with several ranks; "
        "False then fills the last batch of map-style data with its first rows.",
    )
    preprocess: Callable[..., Any] | None = option(
        default=None,
        help="Called by workers on each sample of map-style or iterable data. A parameter named "
        "`rng` gets a generator seeded by the sample.",
    )
    collate: Callable[[list[Any]], Any] | None = option(
        default=None, help="Makes a batch of a list of samples, instead of the default rules."
    )
    workers: Literal["thread", "process"] = option(
        default="thread",
        help='"process" is for Python code that holds the GIL or is not thread-safe. Processes '
        "start later and copy each batch; one that dies is replaced once.",
    )
    cpus: Iterable[int] | None = option(
        default=None, help="Cores that workers run on. Fewer leave more to the trainer."
    )
    numa_node: int | None = option(
        default=None, minimum=0, help="NUMA node whose cores workers run on."
    )
    memory_limit: int = option(
        default=GiB, minimum=1, size=True, help="Bytes for read-ahead and queue. More reads ahead."
    )
    device_preprocess: Callable[[Any], Any] | None = option(
        default=None, help="Called on each batch on the device, on the copy stream. Needs device."
    )
    warmup_batches: int | Literal["auto"] = option(
        default=0,
        minimum=0,
        help='Batches to wait for before the first; 0: off. "auto" decides by the first batch\'s '
        "latency. More start later, and take memory beyond prefetch_size.",
    )
    warmup_timeout: float = option(
        default=30.0, minimum=0, help="Longest wait for them, in seconds; 0: no warmup."
    )


@options
class RemoteOptions:
    """How remote data is fetched. Nothing here but `config` changes the stream."""

    _: KW_ONLY
    connect_timeout: float = option(
        default=10.0, above=0, help="Seconds to reach a server. More wait longer for a dead one."
    )
    request_timeout: float = option(
        default=120.0, above=0, help="Seconds of a request in all. More let slow servers finish."
    )
    stall_timeout: float = option(
        default=10.0,
        above=0,
        help="Seconds to measure min_bytes_per_s over. More notice a stall later.",
    )
    min_bytes_per_s: int = option(
        default=4 * KiB, minimum=0, help="Slowest accepted rate. More give up on slow connections."
    )
    retry_budget: float = option(
        default=180.0,
        above=0,
        help="Seconds to retry a read. Keep it below the collectives' timeout.",
    )
    metadata_budget: float = option(
        default=60.0, above=0, help="Seconds to retry listings and revisions. More start later."
    )
    retry_after_cap: float = option(
        default=30.0, minimum=0, help="Longest `Retry-After` that is honoured, in seconds."
    )
    backoff: float = option(
        default=0.2, minimum=0, help="Seconds before the first retry; doubled each time, up to 10."
    )
    fetches: int = option(
        default=16, minimum=1, help="Requests in flight. More hide latency and take memory."
    )
    hedge: bool = option(
        default=True, help="Send unusually slow reads a second time. Costs a few more requests."
    )
    cache_bytes: int = option(
        default=50 * GiB, minimum=0, size=True, help="Disk for the token cache."
    )
    share_listing: bool = option(
        default=False, help="Rank 0 lists the files for all; all ranks must create the dataset."
    )
    config: str | None = option(
        default=None, help="Configuration of a Hub dataset's card, such as sample-10BT."
    )

    @classmethod
    def of(cls, value: RemoteOptions | Mapping[str, Any] | None) -> RemoteOptions:
        """Return the options that a user gave: an object, a table, or None for the defaults."""
        if isinstance(value, cls):
            return value
        given, known = {} if value is None else value, options_of(cls)
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ConfigError(
                f"remote={value!r}: must be RemoteOptions(…) or a table of {', '.join(known)}"
            )
        return cls(**{name: known[name].read(one, f"remote.{name}") for name, one in given.items()})


@options
class TextOptions:
    """How text is read, tokenized and packed."""

    _: KW_ONLY
    tokenizer: Any = option(
        help='"byte"; a tokenizer.json or its folder; a .tiktoken file; a Hub name; an object of '
        "tokenizers, transformers or tiktoken; or the result of load_tokenizer()."
    )
    seq_len: int = option(minimum=1, help="Ids of a row. Attention's cost grows with its square.")
    text_field: str = option(default="text", help="Column or field that holds the text.")
    packing: Packing = option(
        default="concat",
        help='"concat" loses no token; "bos" starts each row with a document and crops the rest; '
        '"best_fit" cuts only documents longer than a row, and pads.',
    )
    split: Literal["train", "val"] | None = option(
        default=None,
        help="Documents chosen by a hash of their addresses. Defaults to all. Either part reads "
        "all files and tokenizes its own documents.",
    )
    val_fraction: float = option(
        default=0.005, above=0, below=1, help='Share of the documents in "val".'
    )
    format: Format | None = option(
        default=None, help="Format of the files. Defaults to what their names say."
    )
    separator: str | bytes | None = option(
        default=None, help="Text between the documents of a plain-text file. Default: one a file."
    )
    eos: str | int | None = option(
        default=AUTO, help='Token after each document, by name or id. "auto": the tokenizer\'s own.'
    )
    bos: str | int | None = option(default=None, help="Token before each document.")
    positions: bool = option(
        default=False, help="Add positions and cu_seqlens to batches: 8 bytes more a token."
    )
    chunk_bytes: int = option(
        default=4 * MiB,
        minimum=KiB,
        size=True,
        help="Bytes of JSONL or plain text read at once. More take memory in each worker.",
    )
    shuffle_chunks: int = option(
        default=16, minimum=1, help="Chunks of a shuffle window. More mix better and take memory."
    )
    on_bad_record: str = option(
        default="raise",
        pattern="raise|skip|quarantine:.+",
        help='"raise", "skip" a record that cannot be used, or "quarantine:FILE" to also write its '
        "address and the reason to a JSONL file.",
    )
    skip: Iterable[Any] = option(
        default=(), help="Documents to leave out: spans or addresses of `batch.provenance()`."
    )
    doc_batch: int | None = option(
        default=None, minimum=1, help="Documents tokenized at once. Defaults to a whole chunk."
    )
    report_docs: int = option(
        default=2000, minimum=0, help="Documents between two log lines; 0: no lines."
    )
    remote: RemoteOptions | dict[str, Any] | None = option(
        default=None, help="RemoteOptions, or a table of them."
    )
    cache: bool | Literal["auto"] = option(
        default="auto",
        help="Keep tokens on disk, so that the next epoch and run need neither network nor "
        'tokenizer. "auto": for remote data.',
    )
