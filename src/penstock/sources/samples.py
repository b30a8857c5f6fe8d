"""What workers do with samples of the user's own: fetch, preprocess, collate.

Pure functions of sample numbers and epochs, on worker threads or in worker processes. Random numbers
depend on the sample only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.encode.batch import Batch
from penstock.encode.collate import Collated, as_array, default_collate, of_mapping, plain
from penstock.errors import BadRecord, ConfigError
from penstock.order.shuffle import I64, mix
from penstock.sources.base import Work
from penstock.watch.stage_timer import Clock, NullClock


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a `preprocess` that takes the list of a batch's samples and returns a list."""
    function.batched = True  # type: ignore[attr-defined]
    return function


class SampleWork(Work):
    """Fetches samples and makes batches or rows of them."""

    def __init__(
        self,
        dataset: Any,
        *,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or NullClock()
        self._dataset, self._preprocess, self._collate = dataset, preprocess, collate
        self._seed = seed
        self._takes_rng = preprocess is not None and "rng" in _parameters(preprocess)

    def __str__(self) -> str:
        return type(self._dataset).__name__

    def batch(self, indices: I64, epochs: I64) -> Batch:
        """Return a batch of samples."""
        with refuse_stop_iteration():
            return self.collated(self._fetch(indices), indices, epochs)

    def rows(self, indices: I64, epochs: I64, width: int) -> Any:
        """Return samples as rows of `width` ids: as many as can be read, one at least.

        If the first one cannot be read, raise its error. So an error comes after the rows before
        it, for any number of rows that are asked for at once.
        """
        try:
            return self._rows(indices, epochs, width)
        except Exception:
            if len(indices) == 1:
                raise
        good = [self._rows(indices[:1], epochs[:1], width)]
        for i in range(1, len(indices)):
            try:
                good.append(self._rows(indices[i : i + 1], epochs[i : i + 1], width))
            except Exception:  # raised by the next call, which begins with this row
                break
        return np.concatenate(good)

    def _rows(self, indices: I64, epochs: I64, width: int) -> Any:
        if is_rows(self._dataset) and self._preprocess is None:
            with self.clock.stage("fetch", self) as timeline:
                ids = self._dataset.__getitems__(indices)
            timeline.count("fetch", len(ids), ids.nbytes)
            return ids
        with refuse_stop_iteration():
            samples = self._prepared(self._fetch(indices), indices, epochs)
        rows = [as_array(sample) for sample in samples]
        for index, row in zip(indices.tolist(), rows, strict=True):
            if row.shape != (width,) or row.dtype.kind not in "iu":
                raise BadRecord(
                    f"sample {index} has shape {row.shape} and type {row.dtype}: in a mixture, a "
                    f"sample must be a row of seq_len + 1 = {width} ids"
                )
        return np.stack(rows)

    def collated(self, samples: Sequence[Any], indices: I64, epochs: I64) -> Batch:
        """Return a batch of samples that were fetched."""
        with self.clock.stage("decode") as timeline:
            prepared = self._prepared(samples, indices, epochs)
        timeline.count("decode", len(samples))
        with self.clock.stage("batch"), noted(f"in collate, of samples {_shown(indices)}"):
            if self._collate is None:
                made = default_collate(prepared)
            else:
                made = _of_value(self._collate(list(prepared)))
        ids = getattr(made.inputs, "size", None)
        tokens = ids if isinstance(ids, int) else len(samples)
        # The epoch that every sample has reached.
        epoch = int(epochs.min())
        return Batch(made.inputs, made.targets, epoch, 0, data=made.data, _tokens=tokens)

    def _fetch(self, indices: I64) -> Sequence[Any]:
        with self.clock.stage("fetch", self) as timeline:
            samples = self._get(indices)
        timeline.count("fetch", len(indices))
        return samples

    def _get(self, indices: I64) -> Sequence[Any]:
        dataset, numbers, name = self._dataset, indices.tolist(), str(self)
        if hasattr(dataset, "__getitems__"):
            with noted(f"in __getitems__ of {name}, samples {_shown(indices)}"):
                samples: Sequence[Any] = dataset.__getitems__(numbers)
            if len(samples) != len(numbers):
                raise ConfigError(
                    f"__getitems__ of {name} returned {len(samples)} samples for {len(numbers)} indices"
                )
            return samples
        found = []
        for number in numbers:
            with noted(f"in __getitem__ of {name}, sample {number}"):
                found.append(dataset[number])
        return found

    def _prepared(self, samples: Sequence[Any], indices: I64, epochs: I64) -> Sequence[Any]:
        function = self._preprocess
        if function is None:
            return samples
        numbers = indices.tolist()
        if getattr(function, "batched", False):
            with noted(f"in preprocess, samples {_shown(indices)}"):
                changed: Sequence[Any] = function(
                    list(samples), **self._rng(int(epochs[0]), numbers[0])
                )
            return changed
        prepared = []
        for number, epoch, sample in zip(numbers, epochs.tolist(), samples, strict=True):
            with noted(f"in preprocess, sample {number}"):
                prepared.append(function(sample, **self._rng(epoch, number)))
        return prepared

    def _rng(self, epoch: int, index: int) -> dict[str, np.random.Generator]:
        """Return a generator seeded by (seed, epoch, index), if `preprocess` takes one."""
        if not self._takes_rng:
            return {}
        return {"rng": np.random.Generator(np.random.Philox(mix(self._seed, epoch, index)))}


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


@contextmanager
def refuse_stop_iteration() -> Iterator[None]:
    """A StopIteration that leaves the user's code would look like the end of the data."""
    try:
        yield
    except StopIteration as error:
        raised = RuntimeError("a StopIteration came out of the dataset, preprocess or collate")
        for note in getattr(error, "__notes__", ()):
            raised.add_note(note)
        raise raised from None  # with a cause, contextlib would raise the StopIteration again


def is_rows(dataset: Any) -> bool:
    """Return True if a dataset gives rows of ids, a whole batch in one array."""
    return all(hasattr(dataset, name) for name in ("boundaries", "dtype", "seq_len"))


def _of_value(value: Any) -> Collated:
    """Find inputs and targets in what a user's `collate` returned."""
    if isinstance(value, Collated):
        return value
    value = plain(dict(value) if isinstance(value, Mapping) else value)
    if isinstance(value, Mapping):
        return of_mapping(value)
    pair = isinstance(value, tuple | list) and len(value) == 2
    if pair and (isinstance(value, tuple) or all(hasattr(part, "shape") for part in value)):
        return Collated(value[0], value[1], None)
    if isinstance(value, np.ndarray):
        return Collated(value, None, None)
    return Collated(None, None, value)


def _shown(indices: I64) -> str:
    return ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")
