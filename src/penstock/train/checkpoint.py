"""Checkpoints of a run, written atomically by torch.distributed.checkpoint (DCP).

    step-00000100/   .metadata, __0_0.distcp, …    model, optimizer and schedule, by DCP
                     rank-0.json, rank-1.json, …   each rank's data position and random numbers
                     meta.json                     step, settings, and the sizes of all other files

A checkpoint is written under a hidden name, flushed and renamed. It loads on any number of ranks, and
between one process, DDP and FSDP2. DCP stores pickles: load only trusted files. Finding a
checkpoint does not import torch, so that the data can be opened first.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, StateError
from penstock.feed.collectives import Ranks

log = logging.getLogger("penstock")

VERSION = 2
META = "meta.json"


def rank_file(rank: int) -> str:
    """Return the name of a rank's own file."""
    return f"rank-{rank}.json"


class SaveFailed(PenstockError):
    """A checkpoint could not be saved. Earlier ones are unchanged."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint, without its tensors."""

    folder: Path
    step: int
    saved_at: float
    settings: dict[str, Any]
    """The settings that a model must match."""
    ranks: list[dict[str, Any]]
    """The values saved by each rank."""


def read(folder: Path) -> Saved:
    """Return a checkpoint. Raise StateError if it is not complete."""
    try:
        meta = json.loads((folder / META).read_bytes())
        if meta["version"] != VERSION:
            raise ValueError(f"its version is {meta['version']}, not {VERSION}")
        for name, size in meta["files"].items():
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} bytes instead of {size}")
        ranks = [json.loads((folder / rank_file(n)).read_bytes()) for n in range(meta["ranks"])]
        return Saved(folder, int(meta["step"]), float(meta["saved_at"]), meta["settings"], ranks)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StateError(
            f"{folder} is not a complete checkpoint: {error}. Name another one, or use --resume "
            "without a path for the newest that is complete."
        ) from error


def newest(folder: Path) -> Saved | None:
    """Return the complete checkpoint that was saved last, or None if there are no checkpoints.

    The last saved may not have the highest step, because a run may resume from an earlier one.
    """
    found = _complete(folder)
    if not found and any(folder.glob("step-*")):
        raise StateError(
            f"{folder} has checkpoints, but none is complete; see the log. Start without "
            "--resume to move them aside and begin again."
        )
    return found[-1] if found else None


def _complete(folder: Path) -> list[Saved]:
    """Return all complete checkpoints, in the order in which they were saved."""
    found = []
    for path in folder.glob("step-*"):
        try:
            found.append(read(path))
        except StateError as error:
            log.warning("skipped: %s", error)
    return sorted(found, key=lambda each: each.saved_at)


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier run aside. Return their new folder, if there are any."""
    if not any(folder.glob("step-*")):
        return None
    aside = _free_name(folder, ".1")
    os.rename(folder, aside)
    return aside


def _free_name(path: Path, suffix: str = "") -> Path:
    """Return the first of path + suffix, path.2, path.3, … that does not exist."""
    free, number = path.with_name(path.name + suffix), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


class Checkpoints:
    """Saves and loads a run's checkpoints. All ranks must call its methods at the same step."""

    def __init__(
        self, folder: Path, ranks: Ranks, keep: int, model: Any, optimizer: Any, scheduler: Any
    ) -> None:
        """`keep`: checkpoints to keep. Each takes the size of parameters and optimizer state."""
        self._folder, self._ranks, self._keep = folder, ranks, keep
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._group: Any = {"process_group": ranks.group, "no_dist": ranks.group is None}

    def save(self, step: int, own: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
        """Save a checkpoint and remove the oldest. `own`: this rank's values, as JSON."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        rank, text = self._ranks.rank, json.dumps(own)

        def failed(reason: str) -> SaveFailed:
            return SaveFailed(
                f"step {step} could not be saved in {self._folder}: {reason}. Check that the folder "
                "can be written and has room. Earlier checkpoints are unchanged."
            )

        def write() -> str:
            with _quietly():
                save(self._state(), storage_writer=FileSystemWriter(partial), **self._group)
            _write(partial / rank_file(rank), text)
            return ""

        name = self._together(lambda: self._begin(step) if rank == 0 else "", failed)[0]
        partial, final = self._folder / f".{name}", self._folder / name
        meta = {"version": VERSION, "step": step, "settings": dict(settings)}
        try:
            self._together(write, failed)
            self._together(lambda: self._commit(partial, final, meta) if rank == 0 else "", failed)
        finally:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        return final

    def load(self, saved: Saved) -> None:
        """Load a checkpoint in place. After an error the contents are undefined."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        def failed(reason: str) -> StateError:
            return StateError(
                f"{saved.folder} does not fit this run: {reason}. Use the settings in its {META}, or "
                "start a new run in another folder."
            )

        def read_tensors() -> str:
            state = self._state()
            with _quietly():
                load(state, storage_reader=FileSystemReader(saved.folder), **self._group)
            parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self._model, self._optimizer, **parts)
            self._scheduler.load_state_dict(state["scheduler"])
            return ""

        self._together(read_tensors, failed)

    def _state(self) -> dict[str, Any]:
        """Return all tensors under names that do not depend on DDP and FSDP."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def _begin(self, step: int) -> str:
        """Create a hidden folder for a new checkpoint. Remove those of killed saves."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".step-*"):
            shutil.rmtree(leftover)
        # A step that is saved again after a resume does not replace the earlier checkpoint.
        name = _free_name(self._folder / f"step-{step:08d}").name
        (self._folder / f".{name}").mkdir()
        return name

    def _commit(self, partial: Path, final: Path, meta: dict[str, Any]) -> str:
        """Write meta.json, flush all files, rename the folder, and remove the oldest checkpoints."""
        files = {path.name: path.stat().st_size for path in partial.iterdir()}
        world = self._ranks.world
        if missing := {rank_file(rank) for rank in range(world)} - files.keys():
            raise OSError(f"{missing.pop()} is missing: all ranks must write to the same folder")
        meta |= {"saved_at": time.time(), "ranks": world, "files": files}
        _write(partial / META, json.dumps(meta, indent=1))
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        os.rename(partial, final)
        _sync(self._folder)
        for old in _complete(self._folder)[: -self._keep]:
            hidden = old.folder.with_name(f".{old.folder.name}")
            os.rename(old.folder, hidden)  # renamed first, so that no partial checkpoint is visible
            shutil.rmtree(hidden)
        return ""

    def _together(self, work: Callable[[], str], failed: Callable[[str], Exception]) -> list[str]:
        """Call `work` on every rank. Return all results, or raise the same error on all ranks."""
        from torch.distributed.checkpoint.api import CheckpointException

        cause: BaseException | None = None
        try:
            text = "+" + work()
        except (Exception, CheckpointException) as error:  # which is not an Exception
            failures = getattr(error, "failures", None) or {self._ranks.rank: (error, None)}
            named = [f"rank {rank}: {each[0]!r}" for rank, each in failures.items()]
            cause, text = error, "-" + ", ".join(named)
        texts = self._ranks.gather_texts(text)
        if reasons := dict.fromkeys(each[1:] for each in texts if each[0] == "-"):
            raise failed("; ".join(reasons)) from cause
        return [each[1:] for each in texts]


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide DCP's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rng_state() -> dict[str, Any]:
    """Return the states of torch's random number generators, as JSON."""
    import torch

    cuda: Any = torch.cuda
    # Querying an unused device would allocate memory on it.
    states = [torch.get_rng_state(), *(cuda.get_rng_state_all() if cuda.is_initialized() else ())]
    return {"torch": [base64.b64encode(each.numpy().tobytes()).decode() for each in states]}


def set_rng_state(saved: Mapping[str, Any]) -> None:
    """Restore the states of random number generators. Missing devices are ignored."""
    import torch

    cuda: Any = torch.cuda
    data = [bytearray(base64.b64decode(text)) for text in saved["torch"]]
    cpu, *devices = [torch.frombuffer(each, dtype=torch.uint8) for each in data]
    torch.set_rng_state(cpu)
    for index, state in enumerate(devices[: cuda.device_count()]):
        cuda.set_rng_state(state, index)
