"""Save a training run, and continue one: the model, its optimizer, what else has a state, and each rank's own values.

In:    a model (plain, DDP or FSDP2), its optimizer and scheduler; of each rank a dict that JSON can hold.
Out:   a checkpoint on disk (see `saved`) that loads bit by bit, on any number of ranks and in any of the three forms.
Where: the trainer's thread, on all ranks at the same point, between two steps.
State: none between two saves.
Cost:  a save writes parameters and optimizer state once, shared among the ranks, and reads them once for checksums.

DCP (torch.distributed.checkpoint) keeps what is no tensor as pickles and loads them with `torch.load`: checkpoints are
trusted files. Of tensors that are not sharded one rank's are saved, so what differs by rank belongs in its own dict.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.errors import ConfigError, PenstockError, StateError, StateFormat, StateMismatch
from penstock.feed.collectives import Ranks
from penstock.train import saved as disk
from penstock.train.saved import Saved

log = logging.getLogger("penstock")

cuda: Any = torch.cuda  # partly without types

DONE, FAILED = "+", "-"
NAMED = 6
"""Names that an error lists before it only counts."""


class SaveFailed(PenstockError):
    """A checkpoint could not be saved. Those before it are as they were."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Checkpoints:
    """A folder of checkpoints, as the ranks of one run use it. Every method is called by all ranks."""

    def __init__(self, folder: Path | str, ranks: Ranks, keep: int = 3) -> None:
        """`keep`: how many to keep. More cost disk, each as much as parameters and optimizer together."""
        if keep < 1:
            raise ConfigError(f"keep={keep}: at least one checkpoint has to be kept")
        self.folder, self.ranks, self.keep = Path(folder), ranks, keep

    def newest(self) -> Saved | None:
        """The newest good checkpoint, the same on all ranks: rank 0 looks for it and reads it once."""

        def look() -> str:
            found = disk.newest(self.folder) if self.ranks.rank == 0 else None
            return "" if found is None else found.folder.name

        refused = f"no checkpoint can be taken from {self.folder}"
        name = self._all(look, lambda why: StateFormat(f"{refused}: {why}"))[0]
        if not name:
            return None
        taken: list[Saved] = []

        def take() -> str:
            taken.append(disk.load(self.folder / name, checksums=False))
            return ""

        self._all(
            take,
            lambda why: StateFormat(f"{refused}: {why}. All ranks have to see the same folder."),
        )
        return taken[0]

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra_stateful: Mapping[str, Stateful],
        own: dict[str, Any],
        settings: dict[str, Any],
    ) -> Path:
        """Save all, and remove what is older than the `keep` newest. Training goes on as if nothing had been saved.

        `own`: this rank's values. They come back as JSON gives them: keys are strings, tuples are lists.
        """
        final = self.folder / disk.name_of(step)

        def failed(why: str) -> SaveFailed:
            return SaveFailed(
                f"step {step} could not be saved in {self.folder}: {why}. Checkpoints that were there before are as they "
                "were. See that the folder can be written to and has room, then save again or resume from the newest."
            )

        steps = [told[0] for told in self.ranks.gather([step])]
        if len(set(steps)) > 1:
            raise failed(f"the ranks are at different steps, {steps}")
        rank = self.ranks.rank
        partial: Path | None = None
        try:
            name = self._all(
                lambda: disk.begin(self.folder, step).name if rank == 0 else "", failed
            )[0]
            partial = self.folder / name
            texts: list[str] = []
            state: dict[str, Any] = {}

            def collect() -> str:
                texts.append(json.dumps(own))
                json.dumps(settings)
                state.update(_state_of(model, optimizer, extra_stateful))
                return ""

            def write() -> str:
                self._write(partial, state)
                disk.write(partial / disk.rank_name(rank), texts[0])
                names = [disk.rank_name(rank), *[".metadata"] * (rank == 0)]
                paths = [*[partial / name for name in names], *partial.glob(f"__{rank}_*.distcp")]
                return json.dumps({path.name: disk.sealed(path) for path in paths})

            def settle() -> str:
                if rank == 0:
                    meta = {"step": step, "world_size": self.ranks.world, "settings": settings}
                    disk.settle(partial, final, meta, files)
                return ""

            self._all(collect, failed)
            files = {
                name: tuple(facts)
                for told in self._all(write, failed)
                for name, facts in json.loads(told).items()
            }
            self._all(settle, failed)
        except BaseException:
            # After an error that all share nobody writes any more. A rank that was lost may; then some of it stays
            # until the next save.
            if rank == 0 and partial is not None:
                disk.discard(partial)
            raise
        if rank == 0:
            self._prune()
        return final

    def load(
        self,
        saved: Saved,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra_stateful: Mapping[str, Stateful],
    ) -> None:
        """Put a checkpoint into a model, an optimizer and what else was saved, all in place. Gradients are dropped.

        After an error their content is undefined: build them anew, or end.
        """

        def failed(why: str) -> StateMismatch:
            return StateMismatch(
                f"{saved.folder} (step {saved.step}) does not go into this run: {why}. Build model, optimizer and "
                "scheduler with the settings that are in its meta.json, or start a new run in another folder."
            )

        steps = [told[0] for told in self.ranks.gather([saved.step])]
        if len(set(steps)) > 1:
            raise failed(f"the ranks want to load different steps, {steps}")
        state: dict[str, Any] = {}

        def collect() -> str:
            # DCP loads into tensors that are there, and takes an optimizer with gradients for one that has its state.
            optimizer.zero_grad(set_to_none=True)
            state.update(_state_of(model, optimizer, extra_stateful, made_up=True))
            paths = FileSystemReader(saved.folder).read_metadata().planner_data.values()
            stepped = {path[2] for path in paths if path[:2] == ("optimizer", "state")}
            moments = state["optimizer"]["state"]
            state["optimizer"]["state"] = {
                name: moments[name] for name in moments if name in stepped
            }
            return ""

        def read() -> str:
            reader, planner = FileSystemReader(saved.folder), Exactly()
            if self.ranks.group is None:
                with _not_distributed():
                    load(state, storage_reader=reader, planner=planner, no_dist=True)
            else:
                load(state, storage_reader=reader, planner=planner, process_group=self.ranks.group)
            return ""

        def put() -> str:
            # Not strict: a parameter that has had no gradient yet has no state. All else `Exactly` has seen to.
            options = StateDictOptions(strict=False)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
            for name, one in extra_stateful.items():
                one.load_state_dict(state["extra"][name])
            return ""

        for work in (collect, read, put):
            self._all(work, failed)

    def _write(self, partial: Path, state: dict[str, Any]) -> None:
        writer = Writer(partial, sync_files=False)  # `sealed` does it for every file
        if self.ranks.group is None:
            with _not_distributed():
                save(state, storage_writer=writer, no_dist=True)
        else:
            save(state, storage_writer=writer, process_group=self.ranks.group)

    def _prune(self) -> None:
        try:
            # The one just saved is good beyond doubt, so the older ones need not be read through at every save.
            disk.prune(self.folder, self.keep, checksums=False)
        except OSError as error:
            log.warning("%s: older checkpoints could not be removed: %s", self.folder, error)

    def _all(self, work: Callable[[], str], failed: Callable[[str], PenstockError]) -> list[str]:
        """Do a part on every rank, and tell what came of it: all ranks' answers, or the same error on all of them."""
        cause: BaseException | None = None
        try:
            told = DONE + work()
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            told, cause = FAILED + self._reason(error), error
        every = self.ranks.gather_texts(told)
        reasons = dict.fromkeys(text[1:] for text in every if text.startswith(FAILED))
        if isinstance(cause, CheckpointException) and self.ranks.rank in cause.failures:
            own = cause.failures[self.ranks.rank][0]
            if not isinstance(own, Exception):
                raise own  # Ctrl-C, which DCP wraps as if it were an error like any other
        if reasons:
            raise failed("; ".join(reasons)) from cause
        return [text[1:] for text in every]

    def _reason(self, error: BaseException) -> str:
        failures = {self.ranks.rank: error}
        if isinstance(error, CheckpointException):
            failures = {rank: one for rank, (one, _) in error.failures.items()}
        where = "rank {}: " if self.ranks.world > 1 else ""
        return "; ".join(where.format(rank) + _said(one) for rank, one in failures.items())


class Writer(FileSystemWriter):
    """Says what the disk said. torch ends a write that failed with an error of its own, and only the type and text of
    an error reach the other ranks, not what it came from."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            first: BaseException | None = error
            while first is not None and not isinstance(first, OSError):
                first = first.__cause__ or first.__context__
            if first is None:
                raise
            raise OSError(*first.args) from error


class Exactly(DefaultLoadPlanner):
    """Refuses a checkpoint that has more, less or something else than is asked for. DCP would pass over what is more,
    and convert what is of another type."""

    def create_local_plan(self) -> LoadPlan:
        there = self.metadata.state_dict_metadata if self.metadata is not None else {}
        wrong = []
        for name in sorted(self.state_dict.keys() | there.keys()):
            value, kept = self.state_dict.get(name), there.get(name)
            if name not in there:
                wrong.append(f"{name} is not in the checkpoint")
            elif name not in self.state_dict:
                wrong.append(f"{name} is only in the checkpoint")
            elif isinstance(kept, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                wanted, found = (
                    (tuple(value.shape), value.dtype),
                    (tuple(kept.size), kept.properties.dtype),
                )
                if wanted != found:
                    wrong.append(
                        f"{name} was saved as {found[1]} {found[0]} and is {wanted[1]} {wanted[0]} here"
                    )
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise ValueError(", ".join(wrong[:NAMED]) + more)
        return super().create_local_plan()


def rng_state() -> dict[str, Any]:
    """The state of the random numbers of Python, numpy, torch and, where it is in use, CUDA: as JSON holds it."""
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, _text(np.array(words, dtype="<u4").tobytes()), gauss],
        "numpy": [
            str(kind),
            _text(np.asarray(key, dtype="<u4").tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        # Not is_available(): asking would take memory on every device for a process that uses none of them.
        "cuda": [_text(one.numpy().tobytes()) for one in cuda.get_rng_state_all()]
        if cuda.is_initialized()
        else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue with the random numbers of a `rng_state()`. Devices that are not here are passed over."""
    try:
        version, words, gauss = state["python"]
        kind, key, position, has_gauss, cached = state["numpy"]
        own = (version, tuple(np.frombuffer(_bytes(words), dtype="<u4").tolist()), gauss)
        legacy = (kind, np.frombuffer(_bytes(key), dtype="<u4"), position, has_gauss, cached)
        cpu, devices = _tensor(state["torch"]), [_tensor(one) for one in state["cuda"]]
        random.setstate(own)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StateFormat(
            f"that is no state of random numbers ({type(error).__name__}: {error}). Give what rng_state() returned."
        ) from error
    for index, one in enumerate(devices[: cuda.device_count()]):
        cuda.set_rng_state(one, index)


def _state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra_stateful: Mapping[str, Stateful],
    *,
    made_up: bool = False,
) -> dict[str, Any]:
    """All tensors under names that do not depend on how the model is wrapped. `made_up`: also of an optimizer that has
    not stepped yet, to load into."""
    fresh = not optimizer.state
    of_model, of_optimizer = get_state_dict(model, optimizer)
    if fresh and not made_up:
        # torch has made a state up, by a step with zeros that counts as a step. Neither training nor a run that
        # resumes here has taken it.
        optimizer.state.clear()
        of_optimizer["state"] = {}
    extra = {name: one.state_dict() for name, one in extra_stateful.items()}
    return {"model": of_model, "optimizer": of_optimizer, "extra": extra}


@contextmanager
def _not_distributed() -> Iterator[None]:
    """DCP warns whenever it is told that there is a single rank, which is what we tell it."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning
        )
        yield


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
