"""A loader as a PyTorch dataset of finished batches, for trainers that want one.

`TorchDataset` yields plain dicts of tensors. `AllRanks`, `TrainerMixin` and `lightning_callback` let
trainers neither split, skip nor repeat batches: see docs/integrations.md. A state is one string:
`torch.distributed.checkpoint` takes tables apart and loads only the keys that a fresh object has too.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import torch_distributed, write_atomically
from penstock.errors import ConfigError, MissingExtra, StateFormat
from penstock.types import IGNORE

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:  # pragma: no cover - torch is here wherever the tests run
    raise MissingExtra("torch", "as_torch_dataset()", "torch") from error

if TYPE_CHECKING:
    from penstock.encode.batch import Batch
    from penstock.loader import AsyncDataLoader

AHEAD = 16
"""Batches that a trainer may fetch before it trains on them."""
STATE_FILE = "penstock.json"
NO_WORKERS = (
    "a DataLoader with num_workers > 0 would copy the loader into each of its workers. Use "
    "num_workers=0: batches are prepared in the background anyway (n_workers=… of AsyncDataLoader)"
)


class TorchDataset(IterableDataset[dict[str, Any]]):
    """Batches of a loader. Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`.

    Each item is what `collate` made of the user's samples, or for rows of ids a dict with `input_ids`
    and `labels`. Labels are shifted by one. With `shift=False` they are not: models of transformers
    shift them themselves.

    Each `for` is a pass: what is left of the current one, or if that is nothing, the next.
    """

    def __init__(self, loader: AsyncDataLoader, *, shift: bool = True) -> None:
        self.loader = loader
        self._shift = shift
        self._handed: deque[Callable[[], dict[str, Any]]] = deque(maxlen=AHEAD)
        """The states after the batches handed out, for trainers that fetch ahead."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise ConfigError(NO_WORKERS)
        return self._pass()

    def _pass(self) -> Iterator[dict[str, Any]]:
        batch = iter(self.loader).next_batch()
        if batch is None:  # a trainer that stops at the length does not see the end of a pass
            batch = iter(self.loader).next_batch()
        while batch is not None:
            self._handed.append(batch.state_maker())
            item = self._item(batch)
            del batch
            yield item
            del item
            batch = self.loader.next_batch()

    def _item(self, batch: Batch) -> Any:
        if batch.data is not None:
            return batch.data
        if batch.targets is None:
            return batch.inputs
        labels = torch.as_tensor(batch.targets)
        if not self._shift:  # the first id has nothing that predicts it
            labels = torch.cat([torch.full_like(labels[:, :1], IGNORE), labels[:, :-1]], dim=1)
        positions = {} if batch.positions is None else {"position_ids": batch.positions}
        return {"input_ids": batch.inputs, "labels": labels, **positions}

    def __bool__(self) -> bool:
        return True  # also without a len()

    def __len__(self) -> int:
        return len(self.loader)

    def __getstate__(self) -> Any:
        raise ConfigError(NO_WORKERS)

    def set_epoch(self, epoch: int) -> None:
        """Refuse Accelerate's own DataLoader, which calls this, on several ranks.

        It gives the batches of one rank to all, or keeps every n-th: most data would never be seen.
        """
        shard = self.loader._options.shard
        if shard.mod > 1:
            raise ConfigError(
                f"this loader reads part {shard.rem} of {shard.mod} already, and a DataLoader prepared "
                "by Accelerate would split it again. Leave the DataLoader out of "
                "accelerator.prepare(…); with transformers, put penstock.torch_dataset.TrainerMixin "
                "before Trainer. To call set_epoch is never needed."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch handed out: this rank's lanes; see `AllRanks`."""
        return _pack(self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken: of this, of `AllRanks`, or of the loader."""
        try:
            inner: Any = json.loads(state["loader"]) if "loader" in state else state
        except (TypeError, ValueError):
            raise StateFormat(f"not the state of a Penstock dataset: {state!r:.80}") from None
        self.loader.load_state_dict(inner)
        self._handed.clear()

    def _require_rank(self, world: int, rank: int) -> None:
        """Refuse a loader that was made before this process knew its rank."""
        options = self.loader._options
        if not options.alone and (options.shard.mod, options.shard.rem) != (world, rank):
            raise ConfigError(
                f"this is rank {rank} of {world}, but its loader reads part {options.shard.rem} of "
                f"{options.shard.mod}: it was made before the ranks were known. Start with torchrun, "
                "make the loader after init_process_group, or give shard=…"
            )


class AllRanks:
    """The states of all ranks as one, for checkpoints that one rank writes or other ranks read.

    All ranks must call `state_dict` at the same time: it is a collective. It loads on any number of
    ranks that divides the lanes.
    """

    def __init__(self, dataset: TorchDataset) -> None:
        self._dataset = dataset

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks."""
        loader = self._dataset.loader
        return _pack(_gather(loader, loader.state_dict()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the states were taken."""
        self._dataset.load_state_dict(state)


def _pack(state: Any) -> dict[str, Any]:
    return {"loader": json.dumps(state)}


def _gather(loader: AsyncDataLoader, state: dict[str, Any]) -> list[dict[str, Any]]:
    shard = loader._options.shard
    if shard.mod == 1:
        return [state]
    distributed = torch_distributed()
    if distributed is None:
        raise ConfigError(
            f"the states of {shard.mod} ranks are gathered with torch.distributed, which is not "
            "initialised. Call init_process_group first, or save each rank's state_dict() by itself."
        )
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, (shard.rem, state))
    # Ranks that read the same part, as in tensor parallelism, have the same state.
    states: dict[int, dict[str, Any]] = dict(gathered)
    return [states[rem] for rem in sorted(states)]


class TrainerMixin:
    """For `transformers.Trainer`: `class MyTrainer(TrainerMixin, Trainer)`, with a `TorchDataset`.

    Batches reach the model as the loader made them, each rank's its own. Each checkpoint gets the
    state of all ranks, and `train(resume_from_checkpoint=…)` continues with the batch after it.
    """

    args: Any
    train_dataset: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.train_dataset, TorchDataset):
            self.add_callback(_saver(self.train_dataset))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """Return the stream as it is; Accelerate would split it among ranks."""
        if isinstance(self.train_dataset, TorchDataset):
            return _dataloader(self.train_dataset)
        return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the stream for evaluation as it is."""
        dataset = getattr(self, "eval_dataset", None) if eval_dataset is None else eval_dataset
        if isinstance(dataset, TorchDataset):
            return _dataloader(dataset)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, after the batch of a checkpoint if one is given."""
        dataset = self.train_dataset
        if isinstance(dataset, TorchDataset):
            dataset._require_rank(self.args.world_size, self.args.process_index)
            if resume_from_checkpoint is True:
                from transformers.trainer_utils import get_last_checkpoint

                resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
            if isinstance(resume_from_checkpoint, str | Path):
                file = Path(resume_from_checkpoint) / STATE_FILE
                try:
                    saved = json.loads(file.read_bytes())
                except (OSError, ValueError) as error:
                    raise StateFormat(
                        f"{file} is missing or damaged ({error}). Resume from a checkpoint that a "
                        "Trainer with TrainerMixin finished."
                    ) from error
                # Otherwise the Trainer would read and drop the batches before the checkpoint.
                self.args.ignore_data_skip = True
                dataset.load_state_dict(saved)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]


def _dataloader(dataset: TorchDataset) -> Any:
    # Each `iter` of a DataLoader draws a seed. With its own generator, dropout after a resume is what
    # it would have been.
    return DataLoader(dataset, batch_size=None, generator=torch.Generator())


def _saver(dataset: TorchDataset) -> Any:
    from transformers import TrainerCallback

    class SaveStream(TrainerCallback):  # type: ignore[misc]
        """Saves the state beside the model."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved = AllRanks(dataset).state_dict()
            if args.should_save:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                write_atomically(folder / STATE_FILE, json.dumps(saved))

    return SaveStream()


def lightning_callback(dataset: TorchDataset) -> Any:
    """Return a callback for `lightning.Trainer` that keeps the state of all ranks in its checkpoints.

    If the length is unknown, Lightning fetches a batch ahead. The state is nevertheless that of the
    batch in training, and a batch that was fetched but not used comes again.
    """
    from lightning.pytorch import Callback

    class StreamState(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self._trained = dataset.loader.state_dict
            """Returns the state after the batch in training."""

        @property
        def state_key(self) -> str:
            return "penstock"

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                dataset._require_rank(trainer.world_size, trainer.global_rank)
                self._begin()

        def _begin(self) -> None:
            dataset._handed.clear()
            state = dataset.loader.state_dict()
            self._trained = lambda: state

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit" and dataset._handed:
                dataset.load_state_dict(self._trained())

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.teardown(trainer, pl_module, "fit")

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            self._trained = dataset._handed.popleft()

        def state_dict(self) -> dict[str, Any]:
            # If nothing was fetched ahead, the loader's own: it has weights that were set meanwhile.
            state = self._trained() if dataset._handed else dataset.loader.state_dict()
            return _pack(_gather(dataset.loader, state))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            dataset.load_state_dict(state)
            self._begin()

    return StreamState()
