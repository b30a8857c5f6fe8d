"""One settings object, whatever dialect it was written in.

In:    options, the environment, a file, presets.
Out:   `Settings`, and for each of them where its value came from.
Where: the thread that creates a loader.
State: none.

Command line > environment > file > default. A preset ranks just below what is said explicitly in the
source that names it: one on the command line overrides a file, one in a file overrides defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock import config
from penstock.dialects import each_once, from_environment, from_file, from_options, read_file
from penstock.errors import ConfigError
from penstock.recipe import DataTable, build_dataset, read_data
from penstock.types import GiB
from penstock.values import (
    Kind,
    Said,
    byte_size,
    choice,
    cpu_list,
    device_name,
    flag,
    number,
    or_none,
    or_word,
    whole,
)
from penstock.watch.telemetry import Telemetry

T = TypeVar("T")

PRESETS = {
    "balanced": (2, 3),
    "high-performance": (4, 5),
    "memory-constrained": (1, 2),
    "A": (8, 16),
    "B": (4, 8),
    "C": (12, 8),
}
"""`n_workers` and `prefetch_size`: the AsyncDataLoader guides' examples, and theirs for three machines."""

PASSED_ON = ("shard", "preprocess", "collate", "device_preprocess")
"""Arguments of the loader that are no settings: there is no way to write them into a file."""

FOUND = "penstock.toml"
"""The file that is read from the working directory where none is named."""


def _setting(default: T, kind: Kind) -> T:
    made: T = field(default=default, metadata={"kind": kind})
    return made


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a loader is run. Every value is checked, and may be given as text."""

    prefetch: bool = _setting(True, flag())
    """Off: the plain synchronous path, with the same batches and no threads that make them; each `next`
    takes as long as a batch takes to make."""
    prefetch_size: int = _setting(8, whole(1))
    """Batches kept ready. More hide longer hiccups and take memory, 16 bytes a token."""
    n_workers: int | None = _setting(None, or_none(whole(0), "auto"))
    """Workers that read and tokenize; None: this rank's share of the cores. More than there are cores
    gain nothing on local files, and each holds a chunk in memory. Never changes the stream."""
    workers: Literal["thread", "process"] = _setting(
        "thread", choice("thread", "process", hint="; how many is n_workers")
    )
    """Processes are for Python code of the user's own that holds the GIL; they take longer to start and
    a copy of each batch."""
    restart_workers: bool = _setting(True, flag())
    """Whether a worker process that died is replaced. Off: its death is an error."""
    cpus: tuple[int, ...] | None = _setting(None, or_none(cpu_list()))
    """Cores the workers are kept to. Fewer leave more to the trainer, and make slower batches."""
    numa_node: int | None = _setting(None, or_none(whole(0)))
    """The NUMA node whose cores the workers are kept to; best the accelerator's own."""
    doc_batch: int | None = _setting(None, or_none(whole(1)))
    """Documents tokenized at once; None: a whole chunk. Fewer cost overhead for each call. Never
    changes the stream."""
    report_docs: int = _setting(2000, whole(0))
    """Log a line every so many documents; 0: never. More mean fewer lines."""
    warmup_batches: int | Literal["auto"] = _setting(0, or_word(whole(0), "auto"))
    """Batches to have ready before the first step; "auto" chooses by the first one's latency. More
    start later, and take memory if they exceed `prefetch_size`."""
    warmup_timeout: float = _setting(30.0, number("seconds"))
    """Seconds that warmup may take; 0: no warmup. More may start later."""
    shuffle: bool | None = _setting(None, or_none(flag(), "auto"))
    """A fresh order in each epoch; None: as suits the data, on for map-style data, off for streams.
    Costs the memory of a window."""
    seed: int = _setting(0, whole(0))
    """Which order. Any number costs the same."""
    batch_size: int | None = _setting(None, or_none(whole(1)))
    """Rows of a batch, for this rank. More take memory in proportion, in the queue too."""
    epochs: int | None = _setting(None, or_none(whole(1)))
    """Passes over the data; None: endless. The AsyncDataLoader guides call it `num_epochs`, and so may everybody."""
    learning_rate: float | None = _setting(None, or_none(number()))
    """The trainer's; the loader only passes it on."""
    lanes: int | None = _setting(None, or_none(whole(1), "auto"))
    """Independent sequences, dealt to ranks; None: as many as ranks. More resume on more world sizes,
    and each has a window in memory."""
    drop_last: bool | None = _setting(None, or_none(flag(), "auto"))
    """Whether a finite stream ends with its last full batch; None: with several ranks."""
    device: str | None = _setting(None, or_none(device_name()))
    """Where batches are handed out; None: in the CPU's memory."""
    device_prefetch: int = _setting(1, whole(1))
    """Batches copied to the device ahead of time. Each takes device memory."""
    output: Literal["auto", "torch", "numpy"] = _setting("auto", choice("auto", "torch", "numpy"))
    """What a batch consists of; "auto": tensors if torch is installed."""
    memory_limit: int = _setting(GiB, byte_size())
    """Bytes that read-ahead and queue may take. More read further ahead."""
    pad: int | None = _setting(None, or_none(whole(0)))
    """The id that fills samples up to the longest of their batch; None: samples must be equally long."""
    telemetry: bool = _setting(True, flag())
    """Whether it is measured where time goes. Costs some microseconds a step."""
    autotune: bool = _setting(False, flag())
    """Whether workers, read-ahead, requests in flight and queue follow what is measured, within the cores and
    `memory_limit`. Costs a slower few seconds whenever something is tried that does not help. Never changes the stream."""

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            object.__setattr__(self, name, kind.parse(Said(name, getattr(self, name), name)))


KINDS: dict[str, Kind] = {each.name: each.metadata["kind"] for each in fields(Settings)}
_KINDS = KINDS | {"preset": choice(*PRESETS)}


def show(name: str, value: Any) -> str:
    """A setting's value as text that could be written anywhere to get it again."""
    return KINDS[name].show(value)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Settings, and where they came from."""

    settings: Settings
    sources: Mapping[str, str]
    """For each setting "command line --x", "environment X", "file x.toml [loader] x", "preset x" or "default"."""
    preset: str | None
    """The preset that ranks highest, if any was named."""
    file: Path | None
    file_from: str
    """Who named the file: "given", "PENSTOCK_CONFIG", or "found" in the working directory; "" without one."""
    data: DataTable | None
    """The data that the file names, for `build_dataset`."""


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    preset: str | None = None,
    origin: str = "command line --{}",
) -> Resolved:
    """Put the settings together from everywhere they may be written.

    path: the file; by default what PENSTOCK_CONFIG names, else `penstock.toml` if there is one here.
    overrides: what ranks above all else, by the settings' names. None is an option not given.
    environment: variables; by default the process's own.
    origin: how to call an override in messages.
    """
    if environment is None:
        environment = config.environment()
    options = list(from_options(overrides or {}, _KINDS, origin))
    if preset is not None:
        # `--set key=value` is one way to write an option; a preset always has an option of its own.
        is_option = origin.startswith("command line")
        options.append(
            Said(
                "preset", preset, "command line --preset" if is_option else origin.format("preset")
            )
        )
    where, file_from = _find(path, environment)
    named_by = " (named by PENSTOCK_CONFIG)" if file_from == "PENSTOCK_CONFIG" else ""
    file = None if where is None else read_file(where, named_by)
    layers = [
        each_once(options, _KINDS),
        each_once(from_environment(environment, _KINDS), _KINDS, agreeing=True),
        each_once(from_file(file, _KINDS), _KINDS) if file is not None else {},
    ]
    chosen: dict[str, Said] = {}
    for layer in reversed(layers):
        chosen |= _of_preset(layer) | layer
    values = {name: said.value for name, said in chosen.items() if name != "preset"}
    return Resolved(
        settings=Settings(**values),
        sources={name: chosen[name].where if name in chosen else "default" for name in KINDS},
        preset=chosen["preset"].value if "preset" in chosen else None,
        file=where,
        file_from=file_from,
        data=None if file is None else read_data(file),
    )


def _of_preset(layer: Mapping[str, Said]) -> dict[str, Said]:
    if "preset" not in layer:
        return {}
    name = layer["preset"].value
    values = zip(("n_workers", "prefetch_size"), PRESETS[name], strict=True)
    return {setting: Said(setting, value, f"preset {name}") for setting, value in values}


def _find(
    path: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> tuple[Path | None, str]:
    if path is not None:
        return Path(path), "given"
    named = environment.get("PENSTOCK_CONFIG")
    if named:
        return Path(named).expanduser(), "PENSTOCK_CONFIG"
    found = Path(FOUND)
    return (found, "found") if found.exists() else (None, "")


def loader_arguments(settings: Settings) -> dict[str, Any]:
    """The settings as keyword arguments of `AsyncDataLoader`."""
    if settings.batch_size is None:
        raise ConfigError(
            "batch_size: is given nowhere; write it into the file, into PENSTOCK_BATCH_SIZE, or give it as an argument"
        )
    elsewhere = {"prefetch", "doc_batch", "learning_rate"}
    arguments = {name: getattr(settings, name) for name in KINDS if name not in elsewhere}
    if not settings.prefetch:
        arguments["n_workers"] = 0
    return arguments


def build(
    path: str | os.PathLike[str] | None = None,
    dataset: Any = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    batch_size: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A dataset and the keyword arguments of its loader, for `AsyncDataLoader.from_config`.

    dataset: the data; by default what the file names. overrides: settings, `preset`, and the
        loader's arguments that are none. batch_size: where none is set; without it, that is an error.
    """
    given = dict(overrides or {})
    passed_on = {name: given.pop(name) for name in PASSED_ON if name in given}
    if isinstance(given.get("telemetry"), Telemetry):  # on, and one of the caller's own
        passed_on["telemetry"] = given.pop("telemetry")
    resolved = load(path, overrides=given, origin="argument {}")
    settings = resolved.settings
    if settings.batch_size is None:
        settings = replace(settings, batch_size=batch_size)
    arguments = loader_arguments(settings) | passed_on
    if dataset is None:
        if resolved.data is None:
            named = (
                "no file is named, and"
                if resolved.file is None
                else f"file {resolved.file} has no table data, and"
            )
            raise ConfigError(
                f"no data: {named} no dataset was given; write a table data, or give dataset=…"
            )
        dataset = build_dataset(resolved.data, doc_batch=resolved.settings.doc_batch)
    return dataset, arguments
