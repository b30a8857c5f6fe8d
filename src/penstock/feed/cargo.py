"""A batch on its way to a device: which arrays travel, and what they become there.

In:    a batch with its narrow fields, or with arrays that a user's `collate` made.
Out:   the same batch with tensors on the device.
Where: the trainer's thread; `arrive` with the copy stream current.
State: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, rebuild
from penstock.encode.collate import plain
from penstock.errors import ConfigError
from penstock.feed.device import TYPES, Array, DeviceFeed, Landing
from penstock.types import IGNORE
from penstock.watch.stage_timer import Clock


class BatchCargo:
    """One batch."""

    def __init__(self, batch: Batch, device: str) -> None:
        self.batch = batch
        self._device = device
        self._leaves: dict[str, Array] = dict(batch.narrow or {})
        self._data: Any = None
        if batch.narrow is None:
            fields = {"inputs": batch.inputs, "targets": batch.targets, "data": batch.data}
            # What is neither an array nor a tensor stays where it is.
            self._data = self._number(plain(fields), {})

    def _number(self, value: Any, seen: dict[int, str]) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.name in TYPES:
            if (
                id(value) not in seen
            ):  # inputs are often one of the data's own fields: it travels once
                seen[id(value)] = f"leaf {len(self._leaves)}"
                self._leaves[seen[id(value)]] = value
            return _Leaf(seen[id(value)])
        return rebuild(value, lambda v: self._number(v, seen))

    def leaves(self) -> dict[str, Array]:
        return self._leaves

    def arrive(self, landing: Landing) -> None:
        batch = self.batch
        if batch.narrow is None:
            fields = self._resolve(self._data, {name: landing[name] for name in self._leaves})
            batch.inputs, batch.targets, batch.data = (
                fields["inputs"],
                fields["targets"],
                fields["data"],
            )
        else:
            self._widen(landing, batch.narrow)
            batch.narrow = None
        self._leaves = {}

    def _resolve(self, value: Any, landed: dict[str, Any]) -> Any:
        if isinstance(value, _Leaf):
            return landed[value]
        if hasattr(value, "requires_grad"):  # of a type that numpy does not have
            return value.to(self._device)
        return rebuild(value, lambda v: self._resolve(v, landed))

    def _widen(self, landing: Landing, narrow: dict[str, Array]) -> None:
        batch, width = self.batch, narrow["ids"].shape[1]
        batch.inputs = landing.wide("ids", np.s_[:, :-1])
        batch.targets = landing.wide("ids", np.s_[:, 1:])
        if (narrow["valid"] < width).any():
            import torch

            valid = landing.wide("valid")
            columns = torch.arange(1, width, device=valid.device)
            batch.targets.masked_fill_(columns >= valid[:, None], IGNORE)
        if "positions" in narrow:
            batch.positions = landing.wide("positions")
            batch.cu_seqlens = landing[
                "cu_seqlens"
            ].clone()  # a view would keep all that landed alive

    def tensors(self) -> Iterable[Any]:
        found: list[Any] = []

        def collect(value: Any) -> Any:
            if hasattr(value, "record_stream"):
                found.append(value)
            return rebuild(value, collect)

        batch = self.batch
        collect([batch.inputs, batch.targets, batch.positions, batch.cu_seqlens, batch.data])
        return found


class _Leaf(str):
    """Stands for an array that travels."""

    __slots__ = ()


def open_feed(
    name: str,
    take: Callable[[float | None], Batch | None],
    poll: Callable[[], Batch | None],
    prefetch: int,
    hook: Callable[[Batch], Batch | None] | None,
    clock: Clock | None = None,
) -> DeviceFeed[BatchCargo]:
    """The way to the device of that name, for batches."""
    from penstock.feed.torch_device import open_device

    def wrap(batch: Batch | None) -> BatchCargo | None:
        return None if batch is None else BatchCargo(batch, name)

    def change(cargo: BatchCargo) -> None:
        assert hook is not None
        made = hook(cargo.batch)
        if made is not None and not isinstance(made, Batch):
            raise ConfigError(
                f"device_preprocess gave {type(made).__name__}: needs a Batch, or None for the one that it was given"
            )
        if made is not None and made is not cargo.batch:
            made.stand_for(cargo.batch)
            cargo.batch = made

    return DeviceFeed(
        open_device(name),
        lambda timeout: wrap(take(timeout)),
        lambda: wrap(poll()),
        prefetch,
        None if hook is None else change,
        clock,
    )
