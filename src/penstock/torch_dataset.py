"""Adapters of a loader for PyTorch's DataLoader, transformers, Accelerate and Lightning.

`TorchDataset` yields rows or whole batches. `AllRanks`, `TrainerMixin` and `lightning_callback`
save the state of all ranks in the checkpoints of other libraries. A state is a string and a number,
because `torch.distributed.checkpoint` flattens tables and loads only keys that a new object has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import write_atomically
from penstock.encode.batch import Batch
from penstock.errors import ConfigError, StateError, missing_extra
from penstock.state import gather

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError:
    raise missing_extra("torch", "a dataset for PyTorch", "torch") from None

if TYPE_CHECKING:
    from penstock.loader import AsyncDataLoader

STATE_FILE = "penstock.json"
OF_BATCH = ("cu_seqlens", "max_seqlen")
"""Fields that belong to a whole batch and not to its rows."""
NO_WORKERS = (
    "a DataLoader with num_workers > 0 would copy the loader into each of its workers. Use "
    "num_workers=0: batches are prepared in the background anyway (n_workers=… of AsyncDataLoader)"
)


class TorchDataset(IterableDataset[dict[str, Any]]):
    """The rows of a loader, for `DataLoader(dataset, batch_size=8)`; or its whole batches.

    A row is a dict of the batch's fields: `input_ids` and `labels` (not shifted, as transformers
    expects), or the fields of your own samples. A `for` starts or continues a pass, as with the
    loader.
    """

    def __init__(self, loader: AsyncDataLoader, *, batched: bool = False) -> None:
        self.loader, self.batched = loader, batched
        self._before: Callable[[], dict[str, Any]] = loader.state_dict
        self._handed = 0
        """The state before the current batch, and the number of its rows already returned."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise ConfigError(NO_WORKERS)
        # Generators, because some libraries call `iter` only for a state, which must start nothing.
        return self._batches() if self.batched else self._rows()

    def _batches(self) -> Iterator[dict[str, Any]]:
        yield from map(FinishedBatch, self.loader)

    def _rows(self) -> Iterator[dict[str, Any]]:
        loader = self.loader
        if self._handed and loader._begun:  # the last `for` ended within a batch
            if loader._options.epochs is None:
                loader.load_state_dict(self._before())
            else:
                self._handed = 0
        batches = iter(loader)
        before: Callable[[], dict[str, Any]] = loader.state_dict().copy
        for batch in batches:
            fields = {name: value for name, value in batch.items() if name not in OF_BATCH}
            rows = _length(batch, fields)
            for row in range(min(self._handed, rows), rows):
                # After the last row, the loader's own state: it includes weights set since.
                last = row == rows - 1
                self._handed = 0 if last else row + 1
                self._before = loader.state_dict if last else before
                yield {name: value[row] for name, value in fields.items()}
            before = batch.state_maker()
            if self._handed:  # a loaded count covers this whole batch or more
                self._handed, self._before = self._handed - rows, before

    def __bool__(self) -> bool:
        return True  # even if len() raises

    def __len__(self) -> int:
        return len(self.loader) if self.batched else self.loader._rows_of_pass()

    def __getstate__(self) -> Any:
        raise ConfigError(NO_WORKERS)

    def set_epoch(self, epoch: int) -> None:
        """Raise on several ranks: only a DataLoader that Accelerate prepared calls this.

        It gives the rows of one rank to all ranks, or keeps every n-th row, which skips most data.
        """
        shard = self.loader._options.shard
        if shard.mod > 1:
            raise ConfigError(
                f"this loader reads part {shard.rem} of {shard.mod} already, and a DataLoader prepared "
                "by Accelerate would split it again. Give accelerator.prepare(…) the loader itself; "
                "with transformers, put penstock.torch_dataset.TrainerMixin before Trainer."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row returned, with this rank's lanes; see `AllRanks`."""
        return self._packed(self._before())

    def full_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks as one. A collective."""
        return self._packed(gather(self._before(), self.loader._options.shard))

    def _packed(self, state: dict[str, Any]) -> dict[str, Any]:
        # Rows are counted over all ranks, so that the number of ranks may change.
        rows = self._handed * self.loader._options.shard.mod
        return {"loader": json.dumps(state), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of this dataset, of `AllRanks` or of the loader."""
        world, rows = self.loader._options.shard.mod, state.get("rows", 0)
        try:
            inner: Any = json.loads(state["loader"]) if "loader" in state else state
            handed, left = divmod(rows, world)
        except (TypeError, ValueError):
            raise StateError(f"not the state of a Penstock dataset: {state!r:.80}") from None
        if left or (rows and self.batched):
            raise StateError(
                f"the state is {rows} rows into a batch: {world} ranks cannot resume there, nor "
                "can batched=True. Save after a whole batch, or resume with the same setup."
            )
        self.loader.load_state_dict(inner)
        self._handed = handed
        self._before = self.loader.state_dict().copy if handed else self.loader.state_dict


class FinishedBatch(dict[str, Any]):
    """The fields of a batch. Raises if a DataLoader with a batch_size batches it again.

    torch's `default_collate` keeps the type of a mapping and updates a copy with stacked fields.
    """

    def update(self, fields: Any = (), /, **more: Any) -> None:
        """Replace fields. Raise if the new ones are stacks."""
        new = dict(fields, **more)
        if any(_dimensions(new[name]) > _dimensions(self[name]) for name in new.keys() & self):
            raise ConfigError(
                "these are whole batches, and a DataLoader with a batch_size would batch them "
                "again. Use batch_size=None, or as_torch_dataset() without batched=True."
            )
        super().update(new)


def _dimensions(value: Any) -> int:
    return getattr(value, "ndim", 0)


def _length(batch: Batch, fields: Mapping[str, Any]) -> int:
    """Return the number of rows in a batch. Raise if its fields cannot be cut into rows."""
    cut = batch.data is None or isinstance(batch.data, Mapping)
    sizes = {len(v) if isinstance(v, list) or _dimensions(v) else 0 for v in fields.values()}
    if not cut or len(sizes) != 1 or 0 in sizes:
        raise ConfigError(
            f"a batch of {', '.join(fields)} cannot be cut into rows. Use "
            "as_torch_dataset(batched=True), with DataLoader(dataset, batch_size=None)."
        )
    return sizes.pop()


def _require_rank(loader: AsyncDataLoader, world: int, rank: int) -> None:
    """Raise if the loader was created before this process knew its rank."""
    options = loader._options
    if not options.alone and (options.shard.mod, options.shard.rem) != (world, rank):
        raise ConfigError(
            f"this is rank {rank} of {world}, but its loader reads part {options.shard.rem} of "
            f"{options.shard.mod}: it was created before the ranks were known. Start with "
            "torchrun, create the loader after init_process_group, or pass shard=…"
        )


class AllRanks:
    """The states of all ranks as one, for checkpoints that one rank writes or other ranks read.

    `state_dict` is a collective: all ranks must call it. The state loads on any number of ranks
    that divides the lanes.
    """

    def __init__(self, stream: AsyncDataLoader | TorchDataset) -> None:
        if not isinstance(stream, TorchDataset):
            stream = TorchDataset(stream, batched=True)
        self._dataset = stream

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks."""
        return self._dataset.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the states of all ranks."""
        self._dataset.load_state_dict(state)


class TrainerMixin:
    """For `transformers.Trainer`: `class MyTrainer(TrainerMixin, Trainer)`, with a `TorchDataset`.

    Each rank trains on its own rows. Each checkpoint includes the state of all ranks, and
    `train(resume_from_checkpoint=…)` resumes at the next row.
    """

    args: Any
    train_dataset: Any
    data_collator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.train_dataset, TorchDataset):
            self.add_callback(_saver(self.train_dataset))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """Return the stream without Accelerate, which would split it among ranks."""
        if isinstance(self.train_dataset, TorchDataset):
            return self._dataloader(self.train_dataset, self.args.train_batch_size)
        return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation stream without Accelerate."""
        dataset = getattr(self, "eval_dataset", None) if eval_dataset is None else eval_dataset
        if isinstance(dataset, TorchDataset):
            return self._dataloader(dataset, self.args.eval_batch_size)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def _dataloader(self, dataset: TorchDataset, batch_size: int) -> Any:
        # Each `iter` of a DataLoader draws a seed. With a separate generator, dropout is the same
        # after a resume.
        generator = torch.Generator()
        if dataset.batched:
            return DataLoader(dataset, batch_size=None, generator=generator)
        return DataLoader(dataset, batch_size, collate_fn=self.data_collator, generator=generator)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, resuming at the next row if a checkpoint is given."""
        dataset = self.train_dataset
        if isinstance(dataset, TorchDataset):
            _require_rank(dataset.loader, self.args.world_size, self.args.process_index)
            if resume_from_checkpoint is True:
                from transformers.trainer_utils import get_last_checkpoint

                resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
            if isinstance(resume_from_checkpoint, str | Path):
                saved = json.loads((Path(resume_from_checkpoint) / STATE_FILE).read_bytes())
                # Otherwise the Trainer would read and drop the rows before the checkpoint.
                self.args.ignore_data_skip = True
                dataset.load_state_dict(saved)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]


def _saver(dataset: TorchDataset) -> Any:
    from transformers import TrainerCallback

    class SaveStream(TrainerCallback):  # type: ignore[misc]
        """Saves the state next to the model."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved = dataset.full_state_dict()
            if args.should_save:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                write_atomically(folder / STATE_FILE, json.dumps(saved))

    return SaveStream()


def lightning_callback(loader: AsyncDataLoader) -> Any:
    """Return a callback for `lightning.Trainer` that keeps the state of all ranks in its checkpoints.

    For `trainer.fit(model, loader)`. Without it, Lightning saves only the state of rank 0; if the
    length is unknown, that of a batch it fetched ahead.
    """
    from lightning.pytorch import Callback

    class StreamState(Callback):  # type: ignore[misc]
        _trained: Callable[[], dict[str, Any]] | None = None
        """Returns the state after the batch in training."""

        @property
        def state_key(self) -> str:
            return "penstock"

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                _require_rank(loader, trainer.world_size, trainer.global_rank)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
            if not isinstance(batch, Batch):
                raise ConfigError(
                    f"lightning_callback got a {type(batch).__name__} instead of the loader's Batch. "
                    "Pass the loader itself: trainer.fit(model, loader)."
                )
            self._trained = batch.state_maker()

        def state_dict(self) -> dict[str, Any]:
            # If nothing was fetched ahead, the loader's own state: it includes weights set since.
            state = loader.state_dict()
            trained = state if self._trained is None else self._trained()
            ahead = trained["batch"] != state["batch"]
            return gather(trained if ahead else state, loader._options.shard)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            loader.load_state_dict(state_dict)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            # Otherwise Lightning would then load the loader state that it saved itself.
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    return StreamState()
