"""A loader as a PyTorch dataset of finished batches, for trainers that want one.

In:    a loader.
Out:   an `IterableDataset` whose items are batches: plain dicts of tensors.
Where: the process and thread that iterates; `torch.utils.data.DataLoader` must have `num_workers=0`,
       for the loader has workers of its own.
State: the loader's, under the names that torchdata and `torch.distributed.checkpoint` expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, MissingExtra

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:  # pragma: no cover - torch is here wherever the tests run
    raise MissingExtra("torch", "as_torch_dataset()", "torch") from error

if TYPE_CHECKING:
    from penstock.encode.batch import Batch
    from penstock.loader import AsyncDataLoader


class TorchDataset(IterableDataset[dict[str, Any]]):
    """Batches of a loader. Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`.

    Each item is what `collate` made of the user's samples, or for rows of ids a dict with `input_ids`
    and `labels`. The labels are shifted already unless `shift=False` was asked for: then they equal the
    inputs, as models want them that shift by themselves (those of transformers do).
    """

    def __init__(self, loader: AsyncDataLoader, *, shift: bool = True) -> None:
        self.loader = loader
        self._shift = shift

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise ConfigError(
                "a DataLoader with num_workers > 0 would copy the loader into each of its workers. Use num_workers=0: "
                "batches are prepared in the background anyway (n_workers=… of AsyncDataLoader)."
            )
        for batch in self.loader:
            yield self._item(batch)

    def _item(self, batch: Batch) -> Any:
        if batch.data is not None:
            return batch.data
        if batch.targets is None:
            return batch.inputs
        if not self._shift:
            return {"input_ids": batch.inputs, "labels": self._unshifted(batch)}
        item = {"input_ids": batch.inputs, "labels": batch.targets}
        if batch.positions is not None:
            item["position_ids"] = batch.positions
        return item

    def _unshifted(self, batch: Batch) -> Any:
        """Labels at the places of the inputs that they are about. The first has none to be predicted from."""
        first = torch.full_like(batch.targets[:, :1], -100)
        return torch.cat([first, batch.targets[:, :-1]], dim=1)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken."""
        self.loader.load_state_dict(state)
