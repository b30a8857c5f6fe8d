"""The single declaration of every option: its type, default, bounds and help.

`LoaderOptions`, `TextOptions` and `RemoteOptions` are frozen dataclasses; `PreparedOptions` and
`TrainOptions` are declared the same way, next to what they configure. Their docstrings say what
each option does and what a larger value costs. Creating an object checks its values against
annotations and bounds. Signatures, settings files, environment variables, `penstock config` and
the settings page derive from them.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

from penstock.errors import ConfigError, unknown
from penstock.types import AUTO, Address, Format, GiB, KiB, MiB, Packing, Shard

T = TypeVar("T")
P = ParamSpec("P")
First = TypeVar("First")

REFUSED = (ValueError, TypeError, LookupError, ArithmeticError)
FLAGS = dict.fromkeys(("1", "true", "on", "yes"), True)
FLAGS |= dict.fromkeys(("0", "false", "off", "no"), False)
NAMES: dict[Any, str] = {
    bool: "true or false",
    str: "text",
    bytes: "bytes",
    Path: "a path",
    Any: "anything",
    get_origin(Callable[..., Any]): "a function",
    Iterable[int]: "CPU numbers such as [0, 1] or '0-3,8'",
    Iterable[Sequence[Any]]: "spans, or addresses of documents: (file, row group or None, row)",
    tuple[str, Callable[[Any], Any]]: "(name, function)",
}

# Declaring options


def option(*, default: Any = MISSING, **about: Any) -> Any:
    """Declare an option as a dataclass field. `about` sets further fields of `Option`."""
    return field(default=default, metadata=about)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make a frozen dataclass that checks and normalises every field when it is created."""

    def check_all(self: Any) -> None:
        for name, each in options_of(cls).items():
            object.__setattr__(self, name, each.read(getattr(self, name)))

    made: Any = cls
    made.__post_init__ = check_all
    dataclass(frozen=True)(made)
    hints, helps = typing.get_type_hints(made), _helps(made.__doc__ or "")
    made.__options__ = {
        each.name: Option(
            each.name,
            hints[each.name],
            each.default,
            **{"help": helps.get(each.name, ""), **each.metadata},
        )
        for each in fields(made)
    }
    return cls


def _helps(doc: str) -> dict[str, str]:
    """Return the help of each option: paragraphs of a docstring such as "seed: The order."."""
    parts = re.split(r"^(\w+): ", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {
        name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def options_of(cls: Any) -> Mapping[str, Option]:
    """Return the options that a class declares, by name."""
    return dict(cls.__options__)


@dataclass(frozen=True)
class Option:
    """A declared option: which values it accepts, and how they are read and shown.

    Every value can be written as text: "on", "512MiB", "0-3,8", and `none` for None.
    """

    name: str
    hint: Any
    default: Any
    help: str
    """Its effect, and the cost of a larger value."""
    minimum: float = -inf
    below: float = inf
    """Bounds of a number; `below` is exclusive."""
    size: bool = False
    """A number of bytes; as text also "512MiB"."""
    none: str = "none"
    """The text that means None."""
    pattern: str = ".+"
    """The regular expression that a text must match."""
    group: str = ""
    implied: str | None = None
    """For the command line: the heading, and the value of the option without an argument."""

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The alternatives of the annotation."""
        union = get_origin(self.hint) in (typing.Union, types.UnionType)
        return get_args(self.hint) if union else (self.hint,)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are accepted literally."""
        literals = [kind for kind in self.kinds if get_origin(kind) is Literal]
        return tuple(word for kind in literals for word in get_args(kind))

    def read(self, value: Any, where: str = "") -> Any:
        """Return the normalised value. Raise ConfigError naming its source and the valid values."""
        # None comes first, so that "none" is not read as a text.
        for kind in sorted(self.kinds, key=lambda kind: kind is not types.NoneType):
            try:
                return self._read_as(kind, value)
            except REFUSED:
                continue
        written = f"{where} = {value!r}" if where else f"{self.name}={value!r}"
        raise ConfigError(f"{written}: must be {self.needs()}")

    def show(self, value: Any) -> str:
        """Return the value as text that `read` accepts."""
        if value is None:
            return self.none
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return _show_size(value) if self.size else str(value)

    def _read_as(self, kind: Any, value: Any) -> Any:
        """Return the value as one of `kinds`, or raise one of REFUSED."""
        word = str(value).strip().lower() if isinstance(value, str | int | None) else ""
        if kind is types.NoneType:
            return {"none": None, self.none: None}[word]
        if kind is bool:
            return FLAGS[word]
        if get_origin(kind) is Literal:
            return {each: each for each in get_args(kind)}[word]
        if kind == Iterable[int]:
            return read_cpus(value)
        if kind == Iterable[Sequence[Any]]:
            return frozenset(map(Address.of, value))
        if kind is Path:
            return Path(value).expanduser()
        if kind is int or kind is float:
            text, number = isinstance(value, str), not isinstance(value, bool)
            value = read_size(value) if text and self.size else value
            value = kind(value) if text or kind is float else operator.index(value)
            fits = number and self.minimum <= value < self.below
        elif get_origin(kind) is tuple:
            parts = zip(value, get_args(kind), strict=True)
            fits = all(isinstance(part, get_origin(each) or each) for part, each in parts)
        elif kind is str:
            fits = re.fullmatch(self.pattern, value, re.DOTALL) is not None
        else:
            fits = kind is Any or isinstance(value, get_origin(kind) or kind)
        if not fits:
            raise ValueError
        return value

    def needs(self) -> str:
        """Describe the valid values."""
        return ", or ".join(map(self._needs, self.kinds))

    def _needs(self, kind: Any) -> str:
        if kind is types.NoneType:
            return repr(self.none)
        if get_origin(kind) is Literal:
            words = ", ".join(map(repr, get_args(kind)))
            return f"one of {words}" if "," in words else words
        if kind is int or kind is float:
            noun = "an integer" if kind is int else "a number"
            unit = " (or a size such as 512MiB)" if self.size else ""
            low = f" ≥ {self.minimum:g}" if self.minimum > -inf else ""
            return noun + low + (f" and < {self.below:g}" if self.below < inf else "") + unit
        if kind is str and self.pattern != ".+":
            return f"text that matches {self.pattern}"
        return NAMES.get(kind) or NAMES.get(get_origin(kind)) or f"a {kind.__name__}"


SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", re.ASCII)


def read_size(text: str) -> int:
    """Return the bytes of a text such as "512MiB", "2 GB" or "1024"."""
    match = SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(text)
    number, unit, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(unit or " ")))


def _show_size(size: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def read_cpus(value: Any) -> tuple[int, ...]:
    """Return the CPUs of a list, or of a text such as "0-3,8"."""
    if not isinstance(value, str):
        return tuple(map(operator.index, value))
    ranges = [part.partition("-") for part in value.split(",")]
    return tuple(cpu for a, _, b in ranges for cpu in range(int(a), int(b or a) + 1))


# Signatures


def accepts(
    cls: Callable[P, Any],
) -> Callable[
    [Callable[Concatenate[Any, First, ...], None]], Callable[Concatenate[Any, First, P], None]
]:
    """Add signature and help of an options class to `__init__(self, first, *args, **kwargs)`."""

    def decorate(init: Callable[..., None]) -> Any:
        own = list(inspect.signature(init).parameters.values())[:2]
        declared = list(inspect.signature(cls).parameters.values())
        init.__signature__ = inspect.Signature([*own, *declared])  # type: ignore[attr-defined]
        about = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[2]
        init.__doc__ = f"{inspect.cleandoc(init.__doc__ or '')}\n{about}"
        return init

    return decorate


SAME = {"num_workers": "n_workers", "collate_fn": "collate", "block_size": "seq_len"}
"""Names of other libraries that mean the same as ours."""
INSTEAD = {
    "world_size": "shard=Shard(world_size, rank). Under torchrun, leave it out",
    "rank": "shard=Shard(world_size, rank). Under torchrun, leave it out",
    "max_length": "seq_len=…, the ids of a row. Documents are packed into rows, not truncated",
    "prefetch_factor": "prefetch_size=…, the batches in the queue, of all workers together",
    "pin_memory": "device='cuda', which pins memory and copies batches ahead of their step",
    "sampler": "shuffle=… and seed=…; to choose samples, wrap the map-style dataset",
}
"""Names of other libraries without an equivalent, and what to use instead."""


def from_habit(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return arguments under our names. Raise for a name in `INSTEAD`, and for an unknown one."""
    for name in given:
        if name in INSTEAD:
            raise ConfigError(f"{name}=…: use {INSTEAD[name]}.")
        if SAME.get(name) in given:
            raise ConfigError(f"{name}=… and {SAME[name]}=… are the same option: pass only one.")
    renamed = {SAME.get(name, name): value for name, value in given.items()}
    if isinstance(split := renamed.get("split"), str):
        renamed["split"] = split.replace("validation", "val")
    for name in renamed.keys() - known:
        raise unknown(f"{name}=…", name, known)
    return renamed


# The options


@options
class LoaderOptions:
    """How a loader runs.

    batch_size: Rows per batch on this rank. More take memory, also in the queue.
    shuffle: Use a new order in each epoch. Defaults to True for map-style data, False for streams.
        Text is shuffled within windows, which take memory.
    seed: Seed of the shuffle, and of `rng` in preprocess.
    n_workers: Workers that read and tokenize; 0: `next()` makes each batch. Defaults to this
        rank's share of the cores. Each holds a chunk in memory.
    prefetch_size: Batches in the queue. More hide longer stalls and take memory, 16 bytes per
        token. "auto" starts at 8 and tunes workers, requests, read-ahead and queue.
    device: Device to copy batches to ahead of their step, such as "cuda". Takes device memory.
    shard: The part of the data to read. Defaults to this rank's. An explicit shard disables
        coordination between ranks, which may then get different numbers of batches.
    lanes: Independent sequences, assigned to ranks. A state loads on every world size that divides
        them. Defaults to the first world size. Each has a shuffle window in memory.
    epochs: Passes over the data. Defaults to an endless stream.
    drop_last: End a finite stream with its last full batch. Defaults to True with several
        ranks; False then fills the last batch of map-style data with its first rows.
    preprocess: Called by workers on each sample of map-style or iterable data. A parameter
        named `rng` gets a generator seeded by seed, epoch and sample.
    collate: Makes a batch from a list of samples, instead of the default rules.
    workers: "process" is for Python code that holds the GIL or is not thread-safe. Processes
        start more slowly and copy each batch; a task whose process dies is retried once.
    cpus: Cores that workers run on. Fewer leave more to the trainer.
    numa_node: NUMA node whose cores workers run on.
    memory_limit: Bytes for read-ahead and queue. A larger value allows more read-ahead.
    device_preprocess: Called on each batch on the device, on the copy stream. Needs device.
    warmup_batches: Batches to buffer before the first is returned; 0: off. "auto" decides by the
        first batch's latency. More delay the start, and take memory beyond prefetch_size.
    warmup_timeout: Longest wait for the warmup, in seconds; 0: no warmup.
    """

    batch_size: int = option(minimum=1)
    shuffle: bool | None = option(default=None, none="auto")
    seed: int = option(default=0, minimum=0)
    n_workers: int | None = option(default=None, minimum=0, none="auto")
    prefetch_size: int | Literal["auto"] = option(default=8, minimum=1)
    device: Any | None = None
    _: KW_ONLY
    shard: Shard | None = None
    lanes: int | None = option(default=None, minimum=1, none="auto")
    epochs: int | None = option(default=None, minimum=1)
    drop_last: bool | None = option(default=None, none="auto")
    preprocess: Callable[..., Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    workers: Literal["thread", "process"] = "thread"
    cpus: Iterable[int] | None = None
    numa_node: int | None = option(default=None, minimum=0)
    memory_limit: int = option(default=GiB, minimum=1, size=True)
    device_preprocess: Callable[[Any], Any] | None = None
    warmup_batches: int | Literal["auto"] = option(default=0, minimum=0)
    warmup_timeout: float = option(default=30.0, minimum=0)


@options
class RemoteOptions:
    """How data is fetched, and other expert options. Only `config` changes the stream.

    connect_timeout: Seconds to reach a server. A larger value waits longer for a dead one.
    request_timeout: Total seconds of a request. A larger value lets slow servers finish.
    stall_timeout: Seconds over which min_bytes_per_s is measured. A larger value detects a stall later.
    min_bytes_per_s: Slowest accepted rate. A higher value gives up on slow connections sooner.
    retry_budget: Seconds to retry a read. Keep it below the collectives' timeout.
    metadata_budget: Seconds to retry listings and revisions. A larger value fails later.
    retry_after_cap: Longest `Retry-After` to honour, in seconds.
    backoff: Seconds before the first retry; doubles each time, up to 10.
    fetches: Requests in flight. More hide latency and take memory.
    hedge: Continue unusually slow reads on another connection. Costs a few more requests.
    cache_bytes: Disk for the token cache.
    share_listing: Rank 0 lists the files for all; all ranks must create the dataset.
    config: A configuration from a Hub dataset's card, such as sample-10BT.
    doc_batch: Documents tokenized at once. Defaults to a whole chunk.
    report_docs: Documents between progress log lines; 0: none.
    """

    _: KW_ONLY
    connect_timeout: float = option(default=10.0, minimum=0.001)
    request_timeout: float = option(default=120.0, minimum=0.001)
    stall_timeout: float = option(default=10.0, minimum=0.001)
    min_bytes_per_s: int = option(default=4 * KiB, minimum=0)
    retry_budget: float = option(default=180.0, minimum=0.001)
    metadata_budget: float = option(default=60.0, minimum=0.001)
    retry_after_cap: float = option(default=30.0, minimum=0)
    backoff: float = option(default=0.2, minimum=0)
    fetches: int = option(default=16, minimum=1)
    hedge: bool = True
    cache_bytes: int = option(default=50 * GiB, minimum=0, size=True)
    share_listing: bool = False
    config: str | None = None
    doc_batch: int | None = option(default=None, minimum=1)
    report_docs: int = option(default=2000, minimum=0)

    @classmethod
    def of(cls, value: RemoteOptions | Mapping[str, Any] | None) -> RemoteOptions:
        """Return options from an object, a table, or None for the defaults."""
        if isinstance(value, RemoteOptions):
            return value
        try:
            return cls(**(value or {}))
        except TypeError:
            names = ", ".join(options_of(cls))
            raise ConfigError(
                f"remote={value!r}: must be RemoteOptions(…) or a table of {names}"
            ) from None


@options
class TextOptions:
    """How text is read, tokenized and packed.

    tokenizer: "byte"; a tokenizer.json or its folder; a .tiktoken file; a Hub name; an object
        of tokenizers, transformers or tiktoken; or the result of load_tokenizer().
    seq_len: Input ids per row. The cost of attention grows with its square.
    text_field: Column or field that holds the text.
    packing: "concat" loses no token; "bos" starts each row with a document and crops the rest;
        "best_fit" cuts only documents longer than a row, and pads.
    split: "train" or "val": documents chosen by a hash of their addresses. "val:0.01" and
        "train:0.01" set the share in "val", 0.005 by default. Either part reads all files.
    format: Format of the files. Defaults to the one their names imply.
    separator: Text between the documents of a plain-text file. Default: one document per file.
    eos: Token after each document, by name or id. "auto": the tokenizer's own.
    bos: Token before each document.
    positions: Add positions and cu_seqlens to batches: 8 more bytes per token.
    chunk_bytes: Bytes of JSONL or plain text read at once. More take memory in each worker.
    shuffle_chunks: Chunks per shuffle window. More mix better and take memory.
    on_bad_record: "raise" for a record that cannot be used, "skip" it, or "quarantine:FILE" to
        also write its address and the reason to a JSONL file.
    skip: Documents to leave out: spans or addresses from `batch.provenance()`.
    filter: Rows to keep, by other columns: a pyarrow expression, or the tuples of pyarrow.parquet,
        such as [("score", ">=", 3)]. Row groups whose statistics rule out a match are not read.
    transform: ("name-and-version", function): the function takes a table of a chunk's columns and
        returns the texts; null drops a document. The name identifies it in states and caches.
    store: A prepared corpus of this text. Its chunks are read instead of tokenized.
    remote: RemoteOptions, or a table of them.
    cache: Keep tokens on disk, so that the next epoch and run need neither network nor
        tokenizer. "auto": only for remote data.
    """

    _: KW_ONLY
    tokenizer: Any
    seq_len: int = option(minimum=1)
    text_field: str = "text"
    packing: Packing = "concat"
    split: str | None = option(
        default=None, pattern=r"(train|val)(:(0?\.\d*[1-9]\d*|\d(\.\d+)?e-\d+))?"
    )
    format: Format | None = None
    separator: str | bytes | None = None
    eos: str | int | None = AUTO
    bos: str | int | None = None
    positions: bool = False
    chunk_bytes: int = option(default=4 * MiB, minimum=KiB, size=True)
    shuffle_chunks: int = option(default=16, minimum=1)
    on_bad_record: str = option(default="raise", pattern="raise|skip|quarantine:.+")
    skip: Iterable[Sequence[Any]] = ()
    filter: Any = None
    transform: tuple[str, Callable[[Any], Any]] | None = None
    store: str | Path | None = None
    remote: RemoteOptions | dict[str, Any] | None = None
    cache: bool | Literal["auto"] = "auto"
