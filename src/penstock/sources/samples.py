"""What workers do with samples of the user's own: fetch, preprocess, put together.

In:    which samples, and in which epoch.
Out:   batches that do not know yet where in the stream they stand.
Where: the workers, in threads or in other processes.
State: none.
Cost:  the user's own code. Rows of ids are gathered by one call for all batches of a task, and a batch
       of them costs some ten microseconds of Python in all.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.encode.batch import Batch, Unfinished, shifted
from penstock.encode.collate import Collated, as_array, of_mapping, plain, put_together
from penstock.encode.deal import document_fields
from penstock.errors import BadRecord, ConfigError
from penstock.order.shuffle import mix
from penstock.watch.spans import Clock, Quiet

I64 = np.ndarray[Any, np.dtype[np.int64]]


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a `preprocess` that takes the samples of a whole batch, as a list, and gives a list."""
    function.batched = True  # type: ignore[attr-defined]
    return function


@dataclass(slots=True)
class Made:
    """What a worker makes of some batches."""

    batches: list[Batch]
    seconds: float
    nbytes: int
    failed: Exception | None = None
    """Why there are no more of them: it belongs to the next one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.batches, self.seconds, self.nbytes, _packed(self.failed))


@dataclass(slots=True)
class Fetched:
    """Rows of ids, and why there are no more of them."""

    ids: Any
    failed: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _fetched, (self.ids, _packed(self.failed))


def _made(batches: list[Batch], seconds: float, nbytes: int, failed: bytes | None) -> Made:
    return Made(batches, seconds, nbytes, _unpacked(failed))


def _fetched(ids: Any, failed: bytes | None) -> Fetched:
    return Fetched(ids, _unpacked(failed))


def _packed(error: Exception | None) -> bytes | None:
    """An exception on its way to another process, in a form that always arrives."""
    if error is None:
        return None
    from penstock.feed.process_pool import portable

    return pickle.dumps(portable(error))


def _unpacked(error: bytes | None) -> Any:
    if error is None:
        return None
    return pickle.loads(error)


class SampleWork:
    """Fetches samples and makes batches of them."""

    def __init__(
        self,
        dataset: Any,
        *,
        preprocess: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        pad: int | None = None,
        seed: int = 0,
        positions: bool = False,
        narrow: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Quiet()
        self._dataset = dataset
        self._preprocess = preprocess
        self._collate = collate
        self._pad = pad
        self._seed = seed
        self._positions = positions
        self._narrow = narrow
        self._rows = is_rows(dataset) and preprocess is None and collate is None
        self._random = preprocess is not None and _takes_rng(preprocess)

    def batches(self, indices: list[I64], epochs: list[I64]) -> Made:
        """Some batches, given the samples of each; up to the first that fails."""
        begun = time.perf_counter()
        made: list[Batch] = []
        failed = None
        try:
            with user_code():
                for i, e in zip(indices, epochs, strict=True):
                    made.append(self.of_samples(self._fetch(i), i, e))
        except Exception as error:
            failed = error
        return Made(made, time.perf_counter() - begun, sum(batch.nbytes for batch in made), failed)

    def row_batches(self, samples: I64, size: int, epochs: list[int], leave: bool = False) -> Made:
        """Some batches of rows of ids, all gathered by one call; the epoch that each has reached is known. `leave` the
        ids as they are: `Batch.finish` widens them."""
        begun = time.perf_counter()
        failed = None
        with self.clock.stage("fetch") as track:
            try:
                ids = self._dataset.__getitems__(samples)
            except Exception as error:
                ids, failed = self._up_to_failure(samples, size, error)
        track.count("fetch", len(ids), ids.nbytes)
        with self.clock.stage("batch"):
            return self._of_rows(samples, ids, size, epochs, begun, failed, leave)

    def _of_rows(
        self,
        samples: I64,
        ids: Any,
        size: int,
        epochs: list[int],
        begun: float,
        failed: Exception | None,
        leave: bool,
    ) -> Made:
        seq_len = ids.shape[1] - 1
        inputs = targets = left = None
        if leave:
            left = shifted(ids)
        elif not self._narrow:
            inputs, targets = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
        made, kind = [], Batch if left is None else Unfinished
        for number, epoch in enumerate(epochs):
            first = number * size
            last = min(first + size, len(ids))
            if failed is not None and last <= first:
                break
            batch = kind(
                None, None, epoch, 0, None, None, None, False, None, None, (last - first) * seq_len
            )
            if inputs is not None and targets is not None:
                batch.inputs, batch.targets = inputs[first:last], targets[first:last]
            elif left is not None:
                batch._left = left[:, first:last]
            else:
                batch.narrow = {
                    "ids": ids[first:last],
                    "valid": np.full(last - first, seq_len + 1, np.int32),
                }
            if self._positions:
                self._add_positions(batch, samples[first:last], seq_len)
            made.append(batch)
        # Inputs and targets of 8 bytes each, and positions; or the ids as they are.
        nbytes = ids.nbytes if self._narrow else ids.size * (24 if self._positions else 16)
        return Made(made, time.perf_counter() - begun, nbytes, failed)

    def rows(self, indices: I64, epochs: I64, width: int) -> Fetched:
        """Samples as rows of ids, all of one width, up to the first that fails: for mixtures."""
        try:
            if self._rows:
                return Fetched(self._dataset.__getitems__(indices))
            return Fetched(self._prepared_rows(indices, epochs, width))
        except Exception as error:
            if self._rows:
                return Fetched(*self._up_to_failure(indices, 1, error))
            good: list[Any] = []
            for i in range(len(indices)):
                try:
                    good.append(self._prepared_rows(indices[i : i + 1], epochs[i : i + 1], width))
                except Exception as own:
                    return Fetched(np.concatenate(good or [np.empty((0, width), np.uint32)]), own)
            return Fetched(np.empty((0, width), np.uint32), error)

    def _prepared_rows(self, indices: I64, epochs: I64, width: int) -> Any:
        with user_code():
            samples = self._prepare(self._fetch(indices), indices, epochs)
        rows = [as_array(sample) for sample in samples]
        for index, row in zip(indices.tolist(), rows, strict=True):
            if row.shape != (width,) or row.dtype.kind not in "iu":
                raise BadRecord(
                    f"sample {index} is of shape {row.shape} and type {row.dtype}: in a mixture a sample has to be "
                    f"a row of seq_len + 1 = {width} ids"
                )
        return np.stack(rows)

    def _up_to_failure(self, samples: I64, size: int, error: Exception) -> tuple[Any, Exception]:
        """The rows before the first `size` of them that cannot be had, and why."""
        good = [np.empty((0, self._dataset.seq_len + 1), self._dataset.dtype)]
        for first in range(0, len(samples), size):
            try:
                good.append(self._dataset.__getitems__(samples[first : first + size]))
            except Exception as own:
                return np.concatenate(good), own
        return good[0], error  # each by itself can be had, and all together cannot

    def of_samples(self, samples: Sequence[Any], indices: I64, epochs: I64) -> Batch:
        """A batch of samples that were fetched."""
        with self.clock.stage("decode") as track:
            prepared = self._prepare(samples, indices, epochs)
        track.count("decode", len(samples))
        with self.clock.stage("batch"):
            return self._put_together(prepared, samples, indices, epochs)

    def _put_together(
        self, prepared: Sequence[Any], samples: Sequence[Any], indices: I64, epochs: I64
    ) -> Batch:
        try:
            if self._collate is None:
                made = put_together(prepared, self._pad)
            else:
                value = self._collate(list(prepared))
                # A plain dict of it, whatever mapping it is: only of that are all fields known, sent and counted.
                value = plain(dict(value) if isinstance(value, Mapping) else value)
                made = of_mapping(value) if isinstance(value, Mapping) else _of_value(value)
        except Exception as error:
            error.add_note(f"in collate, of samples {_some(indices)}")
            raise
        ids = getattr(made.inputs, "size", None)
        tokens = ids if isinstance(ids, int) else len(samples)
        return Batch(
            made.inputs,
            made.targets,
            reached(epochs),
            0,
            data=made.data,
            _tokens=tokens,
            _ids=False,
        )

    def _fetch(self, indices: I64) -> Sequence[Any]:
        with self.clock.stage("fetch", self) as track:
            samples = self._get(indices)
        track.count("fetch", len(indices))
        return samples

    def __str__(self) -> str:
        return type(self._dataset).__name__

    def _get(self, indices: I64) -> Sequence[Any]:
        dataset = self._dataset
        numbers = indices.tolist()
        if hasattr(dataset, "__getitems__"):
            try:
                samples: Sequence[Any] = dataset.__getitems__(numbers)
            except Exception as error:
                error.add_note(
                    f"in __getitems__ of {type(dataset).__name__}, samples {_some(indices)}"
                )
                raise
            if len(samples) != len(numbers):
                raise ConfigError(
                    f"__getitems__ of {type(dataset).__name__} gave {len(samples)} samples for {len(numbers)} indices"
                )
            return samples
        samples = []
        for number in numbers:
            try:
                samples.append(dataset[number])
            except Exception as error:
                error.add_note(f"in __getitem__ of {type(dataset).__name__}, sample {number}")
                raise
        return samples

    def _prepare(self, samples: Sequence[Any], indices: I64, epochs: I64) -> Sequence[Any]:
        function = self._preprocess
        if function is None:
            return samples
        numbers = indices.tolist()
        if getattr(function, "batched", False):
            try:
                more = {"rng": self._rng(int(epochs[0]), numbers[0])} if self._random else {}
                changed: Sequence[Any] = function(list(samples), **more)
            except Exception as error:
                error.add_note(f"in preprocess, samples {_some(indices)}")
                raise
            return changed
        prepared = []
        for number, epoch, sample in zip(numbers, epochs.tolist(), samples, strict=True):
            try:
                more = {"rng": self._rng(epoch, number)} if self._random else {}
                prepared.append(function(sample, **more))
            except Exception as error:
                error.add_note(f"in preprocess, sample {number}")
                raise
        return prepared

    def _rng(self, epoch: int, index: int) -> np.random.Generator:
        """Chance that depends on the sample, and not on who works on it when."""
        return np.random.Generator(np.random.Philox(mix(self._seed, epoch, index)))

    def _add_positions(self, batch: Batch, indices: I64, seq_len: int) -> None:
        row, column = self._dataset.boundaries(indices)
        inside = column < seq_len
        begins = [np.arange(len(indices)) * seq_len, row[inside] * seq_len + column[inside]]
        positions, lengths = document_fields(
            np.unique(np.concatenate(begins)), len(indices), seq_len
        )
        if batch.narrow is not None:
            batch.narrow |= {"positions": positions.astype(np.int32), "cu_seqlens": lengths}
        else:
            batch.positions, batch.cu_seqlens = positions, lengths


def reached(epochs: I64) -> int:
    """The epoch that every row has reached."""
    return int(epochs.min())


def _takes_rng(preprocess: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(preprocess).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return False


class user_code:  # noqa: N801 - it reads like a statement
    """A StopIteration that gets out of a user's function would look like the end of the data."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, StopIteration):
            raised = RuntimeError("a StopIteration came out of the dataset, preprocess or collate")
            for note in getattr(error, "__notes__", ()):
                raised.add_note(note)
            raise raised from error


def is_rows(dataset: Any) -> bool:
    """Whether a dataset gives rows of ids, a whole batch in one array."""
    return (
        hasattr(dataset, "boundaries") and hasattr(dataset, "dtype") and hasattr(dataset, "seq_len")
    )


def _of_value(value: Any) -> Collated:
    if isinstance(value, tuple) and len(value) == 2:
        return Collated(value[0], value[1], None)
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(hasattr(part, "shape") for part in value)
    ):
        return Collated(value[0], value[1], None)  # as torch's own collate gives pairs
    return (
        Collated(value, None, None)
        if isinstance(value, np.ndarray)
        else Collated(None, None, value)
    )


def _some(indices: I64) -> str:
    return ", ".join(map(str, indices[:8].tolist())) + (", …" if len(indices) > 8 else "")
