"""The showcase trainer, from the first moment on: data first, then torch.

In:    options and settings.
Out:   a trained model in a checkpoint, a heartbeat, a report; the exit code.
Where: the trainer's thread. The loader is opened on a thread of its own while torch is imported and the model is built.
State: none; a run's own is in `loop`.

This file imports no torch: importing it takes seconds, which are the loader's to use.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import current_shard, local_rank
from penstock.errors import ConfigError, MissingExtra, StateFormat
from penstock.feed.fallback import BackgroundOpen, Limits, SharedFeed, loader_states
from penstock.settings import Settings
from penstock.train import saved
from penstock.train.console import show
from penstock.train.data import Recipe, make_loader, recipe
from penstock.train.options import BATCH, STEPS, TrainOptions, device_name, on_stall, parallel
from penstock.train.signals import Signals
from penstock.types import shown_address
from penstock.watch.heartbeat import Heartbeat
from penstock.watch.telemetry import Telemetry

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Begun:
    """A run whose data is being opened, and which has not imported torch yet."""

    options: TrainOptions
    resolved: Settings
    recipe: Recipe
    batch_size: int
    accumulate: int
    steps: int | None
    """Where to end; None for the end of the data."""
    device: str | None
    saved: saved.Saved | None
    telemetry: Telemetry
    heartbeat: Heartbeat
    feed: SharedFeed
    open_validation: Callable[[], SharedFeed] | None
    vocabulary: BackgroundOpen[int]
    signals: Signals
    at: float


def train(options: TrainOptions, resolved: Settings) -> int:
    """Run it. Gives the exit code; raises what ends it."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "training", "torch")
    if options.report is not None and importlib.util.find_spec("plotly") is None:
        raise MissingExtra("plotly", "--report", "report")
    began = time.perf_counter()
    shard = current_shard()
    parallel(options, shard.mod)
    batch_size = resolved["batch_size"] or BATCH
    accumulate = _accumulate(options, batch_size, shard.mod)
    epochs = resolved["epochs"]
    steps = options.steps if options.steps is not None or epochs is not None else STEPS
    found = _find(options)
    data = recipe(options, resolved)
    device = device_name(options)
    states = None if found is None else loader_states(_data_of(found))
    telemetry = Telemetry()
    telemetry.prefix = data.prefix
    with ExitStack() as stack:
        # Until all is closed: when a rank dies, its launcher tells the others to stop while they are about to say why.
        signals = stack.enter_context(Signals(options.grace, alone=shard.mod == 1))
        if shard.rem == 0:
            _claim(options.out, stack)
        hooks = _hooks(options, stack)
        heartbeat = Heartbeat(
            options.out,
            observed=telemetry,
            prefix=data.prefix,
            settings=_settings(options, resolved, batch_size, accumulate, steps),
            resumed=found is not None,
            on_metrics=hooks,
        )
        stack.enter_context(heartbeat)
        make = partial(make_loader, data, options, resolved, device=device)
        split = "train" if options.eval_every else None
        limits = Limits(
            on_stall=on_stall(options),
            first_timeout_s=options.loader_timeout,
            stall_timeout_s=options.stall_timeout,
        )
        feed = SharedFeed(
            partial(make, split=split, telemetry=telemetry, states=states),
            limits,
            event=partial(_tell, heartbeat, hooks),
            prefix=data.prefix,
            blame=telemetry.blame,
            resumed=states,
            substituted=() if found is None else _data_of(found)[0]["substituted"],
        )
        stack.callback(feed.close)
        vocabulary = BackgroundOpen(data.vocabulary)
        stack.callback(vocabulary.close)
        signals.wakes.append(feed.interrupt)
        validation = dataclasses.replace(limits, on_stall="stop")
        begun = Begun(
            options=options, resolved=resolved, recipe=data, batch_size=batch_size, accumulate=accumulate, steps=steps,
            device=device, saved=found, telemetry=telemetry, heartbeat=heartbeat, feed=feed,
            open_validation=partial(SharedFeed, partial(make, split="val", telemetry=None), validation) if options.eval_every else None,
            vocabulary=vocabulary, signals=signals, at=began,
        )  # fmt: skip
        try:
            from penstock.train.loop import run  # torch comes with it

            return run(begun)
        except SystemExit:
            if signals.came is not None:
                show(
                    f"[train] told to stop ({signals.came.name}) before the first step: there is nothing to save"
                )
            raise


def _accumulate(options: TrainOptions, batch_size: int, world: int) -> int:
    if options.global_batch is None:
        return options.accumulate
    micro = batch_size * world
    if options.global_batch % world:
        raise ConfigError(
            f"--global-batch {options.global_batch}: is no multiple of the {world} ranks, which have equal shares of it. "
            "Use one that is, or a number of ranks that divides it."
        )
    if options.global_batch % micro:
        raise ConfigError(
            f"--global-batch {options.global_batch}: is no multiple of {micro}, which is --batch {batch_size} on {world} "
            f"rank{'s' * (world > 1)}. Use a --batch that divides {options.global_batch // world}."
        )
    return options.global_batch // micro


def _find(options: TrainOptions) -> saved.Saved | None:
    """The checkpoint to go on from."""
    if options.resume is None:
        return None
    folder = checkpoints_of(options)
    # Every rank reads it through. The ranks have not met yet, and one that took a damaged checkpoint for good would
    # not go on from where the others do.
    found = (
        saved.newest(folder)
        if options.resume == "newest"
        else saved.load(Path(options.resume).expanduser())
    )
    if found is None and saved.there_are(folder):
        raise StateFormat(
            f"{folder} has checkpoints, and none of them is good: the log says why. Name one with --resume PATH, or leave "
            "--resume out to begin anew; they are then moved aside."
        )
    if found is None:
        show(f"[train] --resume: {folder} has no checkpoint yet, so this begins at step 0")
    return found


def _data_of(found: saved.Saved) -> list[dict[str, Any]]:
    """What each rank saved of its data, if that is what a run saves."""
    for number, rank in enumerate(found.ranks):
        data = rank.get("data")
        told = data.get("substituted") if isinstance(data, dict) else None
        if (
            not isinstance(data, dict)
            or not isinstance(data.get("loader", 0), dict | list | None)
            or not isinstance(told, list)
            or not all(map(_is_substitution, told))
            or not isinstance(rank.get("rng"), dict)
        ):
            raise StateFormat(
                f"{found.folder}: {saved.rank_name(number)} does not say where the data stood as this trainer writes it. "
                "It is of another program; resume with that one."
            )
    return [rank["data"] for rank in found.ranks]


def _is_substitution(value: Any) -> bool:
    kinds = {"first": int, "last": int, "reason": str}
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(isinstance(value[k], t) for k, t in kinds.items())
    )


def _claim(folder: Path, stack: ExitStack) -> None:
    """Keep other runs out of a folder, and find out now whether anything can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context(open(folder / ".lock", "a", encoding="utf-8"))  # noqa: SIM115
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: nothing can be written there: {error.strerror}. Choose another."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--out {folder}: another run is writing to it, and they would mix their checkpoints. Give each its own."
        ) from None
    except OSError:
        log.info(
            "%s: this file system has no locks, so nobody sees to it that only one run writes there",
            folder,
        )


def checkpoints_of(options: TrainOptions) -> Path:
    """Where a run's checkpoints are."""
    return options.out / "checkpoints"


def _hooks(options: TrainOptions, stack: ExitStack) -> list[Callable[[int, dict[str, float]], Any]]:
    hooks: list[Any] = []
    if options.metrics_port is not None:
        from penstock.watch.metrics import MetricsServer

        port = options.metrics_port + local_rank() if options.metrics_port else 0
        server = stack.enter_context(MetricsServer(port, setting="--metrics-port"))
        show(f"[train] metrics at {server.url}")
        hooks.append(server)
    if options.tensorboard is not None and current_shard().rem == 0:
        from penstock.watch.metrics import tensorboard

        hook = tensorboard(options.tensorboard)
        stack.callback(hook.close)
        hooks.append(hook)
    return hooks


def _tell(heartbeat: Heartbeat, hooks: list[Any], msg: str, **fields: Any) -> None:
    """An event for the heartbeat, and for those hooks that know what to do with one besides the numbers of a step."""
    heartbeat.event(msg, **fields)
    for hook in hooks:
        if hasattr(hook, "add"):
            hook.add({"msg": msg, "rank": heartbeat.rank, "ts": time.time(), **fields})


def _settings(
    options: TrainOptions, resolved: Settings, batch_size: int, accumulate: int, steps: int | None
) -> dict[str, Any]:
    """What the first line of the heartbeat says of a run."""
    written = {name: value for name, value in vars_of(options).items() if value is not None}
    if options.dataset is not None:
        written["dataset"] = shown_address(
            options.dataset
        )  # heartbeats and reports are for others to read
    loader = {name: value for name, value in resolved.values.items() if value is not None}
    more = {"batch_size": batch_size, "accumulate": accumulate} | (
        {"max_steps": steps} if steps is not None else {}
    )
    return written | more | {"loader": loader}


def vars_of(made: Any) -> dict[str, Any]:
    """A dataclass's values, as JSON has them."""
    return {
        each.name: str(value) if isinstance(value := getattr(made, each.name), Path) else value
        for each in dataclasses.fields(made)
    }
