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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from penstock.errors import ConfigError
from penstock.types import AUTO, Format, GiB, KiB, MiB, Packing, Shard

T = TypeVar("T")
P = ParamSpec("P")
Owner = TypeVar("Owner")
First = TypeVar("First")

MAX_CPUS = 1 << 16
REFUSED = (ValueError, TypeError, LookupError, ArithmeticError)

# Declaring options


def option(
    *,
    default: Any = MISSING,
    help: str,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    size: bool = False,
    none: str = "none",
    pattern: str = "",
    group: str = "",
    implied: str | None = None,
) -> Any:
    """Declare an option as a dataclass field.

    minimum, above, below: bounds of a number; the last two are exclusive. size: a number of bytes,
    in text also "512MiB". none: the text that means None. pattern: what a text must match.
    group, implied: the command line's heading, and the option's meaning without a value.
    """
    about = locals()
    about.pop("default")
    return field(default=default, metadata={"option": about})


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that checks and normalises every field when it is created."""

    def check_all(self: Any) -> None:
        for name, each in options_of(type(self)).items():
            object.__setattr__(self, name, each.check(getattr(self, name)))
        check_together = getattr(self, "check", None)
        if check_together is not None:
            check_together()

    changed: Any = cls
    changed.__post_init__ = check_all
    made: Any = dataclass(frozen=True)(changed)
    hints = get_type_hints(made)
    made.__options__ = {
        each.name: Option(each.name, hints[each.name], each.default, **each.metadata["option"])
        for each in fields(made)
    }
    return cls


@dataclass(frozen=True)
class Option:
    """A declared option: what it accepts, and how its values are read from text and shown."""

    name: str
    hint: Any
    default: Any
    help: str
    minimum: float | None
    above: float | None
    below: float | None
    size: bool
    none: str
    pattern: str
    group: str
    implied: str | None

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The alternatives of the annotation; None comes first."""
        union = get_origin(self.hint) in (Union, types.UnionType)
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
            fits = (
                isinstance(value, str) and value and re.fullmatch(self.pattern or ".*", value, re.S)
            )
            return _require(bool(fits), value)
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
        if kind is str and self.pattern:
            return f"text that matches {self.pattern}"
        named = {
            bool: "True or False",
            str: "text",
            Path: "a path",
            Any: "anything",
            bytes: "bytes",
        }
        if kind == Iterable[int]:
            return "CPU numbers such as [0, 1] or '0-3,8'"
        if get_origin(kind) is Callable_:
            return "a function"
        return named.get(kind) or f"a {(get_origin(kind) or kind).__name__}"


Callable_ = get_origin(Callable[..., Any])
FLAGS = dict.fromkeys(("1", "true", "on", "yes"), True)
FLAGS |= dict.fromkeys(("0", "false", "off", "no"), False)


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _require(fits: bool, value: T) -> T:
    if not fits:
        raise ValueError
    return value


def options_of(cls: Any) -> Mapping[str, Option]:
    """Return the options that a class declares, by name."""
    declared: Mapping[str, Option] = cls.__options__
    return declared


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
        init.__doc__ = "\n".join([inspect.cleandoc(init.__doc__ or ""), *help_of(cls)])
        return init

    return decorate


def help_of(cls: Any) -> Iterator[str]:
    """Yield "name: help" for each option of a class."""
    for each in options_of(cls).values():
        yield f"{each.name}: {each.help}"


# The options


@options
class LoaderOptions:
    """How a loader runs. Only shuffle, seed, lanes, epochs, drop_last and shard change the stream."""

    batch_size: int = option(
        minimum=1,
        help="Rows of a batch on this rank. More take memory in proportion, in the queue too.",
    )
    shuffle: bool | None = option(
        default=None,
        none="auto",
        help="A new order in each epoch. Defaults to True for map-style data and False for streams. "
        "Text files: chunks, and documents within a window; costs the memory of a window.",
    )
    seed: int = option(default=0, minimum=0, help="The order to use. Every number costs the same.")
    n_workers: int | None = option(
        default=None,
        minimum=0,
        none="auto",
        help="Workers that read and tokenize. Defaults to this rank's share of the cores. 0: no "
        "threads, `next()` makes each batch. More than the cores gain nothing on local files, and "
        "each holds a chunk in memory.",
    )
    prefetch_size: int | Literal["auto"] = option(
        default=8,
        minimum=1,
        help="Batches in the queue. More hide longer hiccups and take memory, 16 bytes a token. "
        '"auto" starts at 8; workers, requests, read-ahead and queue then follow measurements.',
    )
    device: Any | None = option(
        default=None,
        help='Where batches go, such as "cuda"; they are copied while the step before runs. Each '
        "copied batch takes device memory. Defaults to the host.",
    )
    _: KW_ONLY
    shard: Shard | None = option(
        default=None,
        help="This reader's part of the data. Defaults to this rank's. An explicit shard disables "
        "coordination between ranks, which may then get different numbers of batches.",
    )
    lanes: int | None = option(
        default=None,
        minimum=1,
        none="auto",
        help="Independent sequences, dealt to ranks. A checkpoint loads on every world size that "
        "divides them. Defaults to the world size of the first start. Each lane has a shuffle "
        "window in memory.",
    )
    epochs: int | None = option(
        default=None, minimum=1, help="Passes over the data. Defaults to an endless stream."
    )
    drop_last: bool | None = option(
        default=None,
        none="auto",
        help="End a finite stream with its last full batch. Defaults to True with several ranks; "
        "for map-style data, False then repeats the first rows to fill the last batch.",
    )
    preprocess: Callable[..., Any] | None = option(
        default=None,
        help="A function that workers call on each sample of map-style or iterable data. A "
        "parameter named `rng` gets a generator seeded by the sample. Its time is the workers' time.",
    )
    collate: Callable[[list[Any]], Any] | None = option(
        default=None,
        help="A function that makes a batch of a list of samples, instead of the default rules.",
    )
    workers: Literal["thread", "process"] = option(
        default="thread",
        help='"process" is for Python code that holds the GIL or is not thread-safe. Processes '
        "start later and copy each batch. A process that dies is replaced once. The number of "
        "workers is n_workers.",
    )
    cpus: Iterable[int] | None = option(
        default=None,
        help="Cores that workers run on. Fewer leave more to the trainer and make batches slower.",
    )
    numa_node: int | None = option(
        default=None,
        minimum=0,
        help="NUMA node whose cores workers run on; best the accelerator's own.",
    )
    memory_limit: int = option(
        default=GiB,
        minimum=1,
        size=True,
        help="Memory for read-ahead and queue. More reads further ahead. One chunk always fits.",
    )
    device_preprocess: Callable[[Any], Any] | None = option(
        default=None,
        help="A function called on each batch on the device, on the copy stream. Needs device.",
    )
    warmup_batches: int | Literal["auto"] = option(
        default=0,
        minimum=0,
        help='Batches to wait for before the first one is returned; 0: off. "auto" decides by the '
        "first batch's latency. More start later, and take memory beyond prefetch_size.",
    )
    warmup_timeout: float = option(
        default=30.0,
        minimum=0,
        help="Longest wait for warmup_batches, in seconds; 0: no warmup. More may start later.",
    )


@options
class RemoteOptions:
    """How remote data is fetched. Nothing here but `config` changes the stream."""

    _: KW_ONLY
    connect_timeout: float = option(
        default=10.0,
        above=0,
        help="Seconds to reach a server, DNS included. More wait longer for a dead server.",
    )
    request_timeout: float = option(
        default=120.0,
        above=0,
        help="Seconds that a request may take in all. More let slow servers finish.",
    )
    stall_timeout: float = option(
        default=10.0,
        above=0,
        help="Seconds over which bytes must arrive at min_bytes_per_s. More notice a dead server "
        "later; fewer take a slow one for dead.",
    )
    min_bytes_per_s: int = option(
        default=4 * KiB,
        minimum=0,
        help="Slowest accepted rate of a connection. More give up on slow connections sooner.",
    )
    retry_budget: float = option(
        default=180.0,
        above=0,
        help="Seconds to retry a read. Keep it below the timeout of collectives, 10 minutes.",
    )
    metadata_budget: float = option(
        default=60.0, above=0, help="Seconds to retry listings, revisions and other metadata."
    )
    retry_after_cap: float = option(
        default=30.0,
        minimum=0,
        help="Longest `Retry-After` that is honoured, in seconds. More may wait longer.",
    )
    backoff: float = option(
        default=0.2,
        minimum=0,
        help="Seconds before the first retry; doubled each time, up to 10. More spare the server.",
    )
    fetches: int = option(
        default=16,
        minimum=1,
        help="Requests in flight. More hide a longer latency and take memory.",
    )
    hedge: bool = option(
        default=True,
        help="Send a read that is much slower than most a second time. Costs a few more requests.",
    )
    cache_bytes: int = option(
        default=50 * GiB,
        minimum=0,
        size=True,
        help="Disk for the token cache. When it is full, entries needed last are dropped first.",
    )
    share_listing: bool = option(
        default=False,
        help="Rank 0 lists the files for all ranks, through torch.distributed. All ranks must then "
        "create their datasets in the same order.",
    )
    config: str | None = option(
        default=None,
        help="Configuration of a Hub dataset's card, such as sample-10BT or name/split.",
    )

    @classmethod
    def of(cls, value: RemoteOptions | Mapping[str, Any] | None) -> RemoteOptions:
        """Return the options that a user gave: an object, a table, or None for the defaults."""
        if isinstance(value, cls):
            return value
        given = {} if value is None else value
        known = options_of(cls)
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
        help="Part of the documents, by a hash of their addresses. Defaults to all. Reading "
        '"val" reads all files and tokenizes its own documents.',
    )
    val_fraction: float = option(
        default=0.005, above=0, below=1, help='Share of the documents in "val".'
    )
    format: Format | None = option(
        default=None, help="Format of the files. Defaults to what their names say."
    )
    separator: str | bytes | None = option(
        default=None,
        help="Text between the documents of a plain-text file. Defaults to one document a file.",
    )
    eos: str | int | None = option(
        default=AUTO,
        help='Special token after each document, by name or id. "auto": the tokenizer\'s own.',
    )
    bos: str | int | None = option(
        default=None, help="Special token before each document, by name or id."
    )
    positions: bool = option(
        default=False,
        help="Add `positions` and `cu_seqlens` to batches, for attention within documents.",
    )
    chunk_bytes: int = option(
        default=4 * MiB,
        minimum=KiB,
        size=True,
        help="Bytes of JSONL or plain text read at once. More take memory in each worker; fewer "
        "have a higher share of overhead.",
    )
    shuffle_chunks: int = option(
        default=16,
        minimum=1,
        help="Chunks of a shuffle window. More mix better; the tokens of two windows are in memory "
        "for each lane.",
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
        default=None,
        minimum=1,
        help="Documents tokenized at once. Defaults to a whole chunk. Fewer cost overhead for each "
        "call. Never changes the stream.",
    )
    report_docs: int = option(
        default=2000,
        minimum=0,
        help="Documents between two log lines; 0: no lines. Never changes the stream.",
    )
    remote: RemoteOptions | dict[str, Any] | None = option(
        default=None, help="RemoteOptions or a table of them: deadlines, retries, cache size."
    )
    cache: bool | Literal["auto"] = option(
        default="auto",
        help="Keep token chunks on disk, so that the next epoch and run need neither network nor "
        'tokenizer. "auto": for remote data.',
    )

    def check(self) -> None:
        """Check what a type cannot say."""
        object.__setattr__(self, "remote", RemoteOptions.of(self.remote))
        if self.separator == b"":
            raise ConfigError("separator=b'': must not be empty")
