"""A loader as a PyTorch dataset of finished batches, for trainers that want one.

In:    a loader.
Out:   an `IterableDataset` whose items are batches: plain dicts of tensors. And what trainers need so that
       they neither split, skip nor repeat any: see docs/integrations.md.
Where: the process and thread that iterates; `torch.utils.data.DataLoader` must have `num_workers=0`,
       for the loader has workers of its own.
State: the loader's, as one string: `torch.distributed.checkpoint` takes tables apart and loads only the keys
       that a fresh object has too. And whether the pass had ended, so that the next `for` is the next pass.
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import write_atomically
from penstock.errors import ConfigError, MissingExtra, StateFormat
from penstock.state import StateMaker

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:  # pragma: no cover - torch is here wherever the tests run
    raise MissingExtra("torch", "as_torch_dataset()", "torch") from error

if TYPE_CHECKING:
    from penstock.encode.batch import Batch, BatchOrigin
    from penstock.loader import AsyncDataLoader

AHEAD = 16
"""Batches that a trainer may have fetched before it trains on them, for a state to be had of the one in training."""
STATE_FILE = "penstock.json"
LIGHTNING_ADVICE = (
    "The 'train_dataloader' does not have many workers",
    "Your `IterableDataset` has `__len__` defined",
    "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable",
)
"""Good advice for other datasets, and wrong for this one: the loader has its own workers, and the callback resumes."""


class TorchDataset(IterableDataset[dict[str, Any]]):
    """Batches of a loader. Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`.

    Each item is what `collate` made of the user's samples, or for rows of ids a dict with `input_ids`
    and `labels`. The labels are shifted already unless `shift=False` was asked for: then they equal the
    inputs, as models want them that shift by themselves (those of transformers do).

    Each `for` is a pass: what is left of the one that was begun, or else the next.
    """

    def __init__(self, loader: AsyncDataLoader, *, shift: bool = True) -> None:
        self.loader = loader
        self.handed = 0
        """Batches handed out by this object."""
        self._shift = shift
        self._ended = False
        self._resumed = False
        self._marks: deque[Callable[[], dict[str, Any]]] = deque(maxlen=AHEAD + 1)

    # Iterating

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise ConfigError(
                "a DataLoader with num_workers > 0 would copy the loader into each of its workers. Use num_workers=0: "
                "batches are prepared in the background anyway (n_workers=… of AsyncDataLoader)."
            )
        return self._pass()

    def _pass(self) -> Iterator[dict[str, Any]]:
        may_be_empty = self._resumed and not self._ended
        self._resumed = False
        batch = self._first_batch()
        if batch is None and not may_be_empty:
            # Whoever stops at the length never hears that the pass is over: this `for` means the next one.
            batch = self._first_batch()
        while batch is not None:
            self._ended = False
            self.handed += 1
            assert batch._origin is not None
            self._mark(batch._origin)
            item = self._item(batch)
            del batch
            yield item
            del item
            batch = self.loader.next_batch()
        self._ended = True

    def _first_batch(self) -> Batch | None:
        iter(self.loader)  # the next pass, if the last one is over
        state = self.loader.state_dict()
        self._marks.clear()
        self._marks.append(lambda: state)
        return self.loader.next_batch()

    def _item(self, batch: Batch) -> Any:
        if batch.data is not None:
            return batch.data
        if batch.targets is None:
            return batch.inputs
        item = {
            "input_ids": batch.inputs,
            "labels": batch.targets if self._shift else self._unshifted(batch),
        }
        if batch.positions is not None:
            item["position_ids"] = batch.positions
        return item

    def _unshifted(self, batch: Batch) -> Any:
        """Labels at the places of the inputs that they are about. The first has none to be predicted from."""
        targets = torch.as_tensor(batch.targets)
        return torch.cat([torch.full_like(targets[:, :1], -100), targets[:, :-1]], dim=1)

    def __bool__(self) -> bool:
        return True  # also where there is no len()

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Called by Accelerate's own DataLoader, and by nothing that leaves the stream as it is.

        On several ranks that DataLoader deals the batches of one rank to all, or keeps every n-th: they
        are the rank's own already, so most of the data would never be seen, without a word.
        """
        shard = self.loader._options.shard
        if shard.mod > 1:
            raise ConfigError(
                f"this loader reads part {shard.rem} of {shard.mod} already, and a DataLoader prepared by Accelerate "
                "would split it again. Leave the DataLoader out of accelerator.prepare(…); with transformers, put "
                "penstock.torch_dataset.TrainerMixin before Trainer. To call set_epoch is never needed."
            )

    def __getstate__(self) -> Any:
        raise ConfigError(
            "a loader cannot be copied into another process: use num_workers=0 with DataLoader, and n_workers=… of "
            "AsyncDataLoader"
        )

    # State

    def state_dict(self, behind: int = 0) -> dict[str, Any]:
        """The state after the last batch handed out, or after one that was handed out `behind` batches earlier.

        It has this rank's lanes only; `AllRanks` has everybody's.
        """
        return self._pack(self._state(behind), behind)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continue where a state was taken. Takes what the loader's `state_dict` gives, too.

        The next `for` is the rest of the pass, and empty where the state was taken at its last batch; where
        the pass was over, it is the next pass.
        """
        ended = False
        inner: Any = state
        if isinstance(state, Mapping) and "loader" in state:
            try:
                inner, ended = json.loads(state["loader"]), bool(state["ended"])
            except (KeyError, TypeError, ValueError):
                raise StateFormat(f"not the state of a Penstock dataset: {state!r:.80}") from None
        self.loader.load_state_dict(inner)
        self._ended, self._resumed = ended, True
        self._marks.clear()

    def _pack(self, state: Any, behind: int) -> dict[str, Any]:
        return {"loader": json.dumps(state), "ended": self._ended and not behind}

    def _state(self, behind: int) -> dict[str, Any]:
        if behind == 0:
            return self.loader.state_dict()
        if not 0 < behind < len(self._marks):
            raise ConfigError(
                f"behind={behind}: the last {max(0, len(self._marks) - 1)} batches are remembered"
            )
        return self._marks[-1 - behind]()

    def _mark(self, origin: BatchOrigin) -> None:
        loader = self.loader
        # The loader's later state: weights that are set meanwhile belong to it.
        self._marks.append(lambda: StateMaker(loader._state)(origin.position()))

    def _require_rank(self, world: int, rank: int) -> None:
        """Refuse a loader that was made before this process knew its rank."""
        options = self.loader._options
        if not options.alone and (options.shard.mod, options.shard.rem) != (world, rank):
            raise ConfigError(
                f"this is rank {rank} of {world}, but its loader reads part {options.shard.rem} of "
                f"{options.shard.mod}: it was made before the ranks were known. Start with torchrun, make the loader "
                "after init_process_group, or give shard=…"
            )


class AllRanks:
    """The state of all ranks as one, for checkpoints that only one rank writes or that other ranks may read.

    Every rank must ask for it at the same time: it is a collective. Loads on any number of ranks that
    divides the lanes.
    """

    def __init__(self, dataset: TorchDataset) -> None:
        self._dataset = dataset

    def state_dict(self, behind: int = 0) -> dict[str, Any]:
        """The states of all ranks."""
        dataset = self._dataset
        return dataset._pack(_gather(dataset.loader, dataset._state(behind)), behind)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the states were taken."""
        self._dataset.load_state_dict(state)


def _gather(loader: AsyncDataLoader, state: dict[str, Any]) -> list[dict[str, Any]]:
    shard = loader._options.shard
    if shard.mod == 1:
        return [state]
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError(
            f"the states of {shard.mod} ranks are gathered with torch.distributed, which is not initialised. Call "
            "init_process_group first, or save each rank's state_dict() by itself."
        )
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (shard.rem, state))
    # Ranks that read the same part, as in tensor parallelism, have the same state.
    states: dict[int, dict[str, Any]] = dict(everyone)
    return [states[rem] for rem in sorted(states)]


class TrainerMixin:
    """For `transformers.Trainer`: `class MyTrainer(TrainerMixin, Trainer)`, with `train_dataset=` a `TorchDataset`.

    Batches reach the model as the loader made them, each rank's its own. Each checkpoint gets the state of
    all ranks, and `train(resume_from_checkpoint=…)` continues with the batch after it, skipping none.
    """

    args: Any
    train_dataset: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.train_dataset, TorchDataset):
            self.add_callback(_saver(self.train_dataset))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """The stream as it is, instead of one that Accelerate splits among ranks."""
        if isinstance(self.train_dataset, TorchDataset):
            return _dataloader(self.train_dataset)
        return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The same for evaluation."""
        dataset = getattr(self, "eval_dataset", None) if eval_dataset is None else eval_dataset
        if isinstance(dataset, TorchDataset):
            return _dataloader(dataset)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint's batch on if one is given."""
        dataset = self.train_dataset
        if isinstance(dataset, TorchDataset):
            dataset._require_rank(self.args.world_size, self.args.process_index)
            if resume_from_checkpoint is True:
                from transformers.trainer_utils import get_last_checkpoint

                resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
            if isinstance(resume_from_checkpoint, str | Path):
                file = Path(resume_from_checkpoint) / STATE_FILE
                if not file.exists():
                    raise StateFormat(
                        f"{file} is missing: the checkpoint was made without TrainerMixin, or not finished"
                    )
                try:
                    saved = json.loads(file.read_bytes())
                except ValueError as error:
                    raise StateFormat(
                        f"{file} is damaged ({error}): resume from another checkpoint"
                    ) from error
                # The state says where to go on; the Trainer would read and drop as many batches again.
                self.args.ignore_data_skip = True
                dataset.load_state_dict(saved)
                dataset._resumed = False  # a Trainer goes to its next epoch by itself
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]


def _dataloader(dataset: TorchDataset) -> Any:
    # Each `iter` of a DataLoader draws a seed. From a generator of its own, so that dropout after a resume is
    # what it would have been.
    return DataLoader(dataset, batch_size=None, generator=torch.Generator())


def _saver(dataset: TorchDataset) -> Any:
    from transformers import TrainerCallback

    class SaveStream(TrainerCallback):  # type: ignore[misc]
        """Puts the state next to the model."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved = AllRanks(dataset).state_dict()
            if args.should_save and not state.is_hyper_param_search:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                write_atomically(folder / STATE_FILE, json.dumps(saved))

    return SaveStream()


def lightning_callback(dataset: TorchDataset) -> Any:
    """A callback for `lightning.Trainer` that keeps the state of all ranks in its checkpoints.

    Where no length is known Lightning fetches a batch before it needs it. The state is that of the batch in
    training all the same, and a batch that was fetched for nothing comes again.
    """
    from lightning.pytorch import Callback

    class StreamState(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self._first: int | None = None  # what had been handed out when `fit` began
            self._begun = 0

        @property
        def state_key(self) -> str:
            return "penstock"

        @property
        def _behind(self) -> int:
            return 0 if self._first is None else dataset.handed - self._first - self._begun

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                dataset._require_rank(trainer.world_size, trainer.global_rank)
                self._first, self._begun = dataset.handed, 0
                for advice in LIGHTNING_ADVICE:
                    warnings.filterwarnings("ignore", advice)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if self._behind:
                dataset.load_state_dict(dataset.state_dict(self._behind))
            self._first = None

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.teardown(trainer, pl_module, "fit")

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            self._begun += 1

        def state_dict(self) -> dict[str, Any]:
            return AllRanks(dataset).state_dict(self._behind)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            dataset.load_state_dict(state)
            dataset._resumed = False  # Lightning goes to its next epoch by itself

    return StreamState()
