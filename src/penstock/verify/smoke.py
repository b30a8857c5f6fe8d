"""The first batch, the way a run gets it: listing, threads, queue and all, within a time that holds.

In:    a `Choice`, and how long it may take.
Out:   a `Smoke`: the batch's shape, the queue, and the ledger of the start.
Where: the calling thread; the data is opened on a thread of its own, because a listing waits as long as a server
       lets it. What is still under way when the time is over ends with the program.
State: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from penstock.encode.batch import Batch
from penstock.errors import LoaderTimeout, NoData
from penstock.feed.opening import Opening
from penstock.loader import AsyncDataLoader
from penstock.tally import Warmup
from penstock.verify.choice import Choice
from penstock.watch.attribution import charge


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    """What was seen."""

    first_batch_s: float
    """From the beginning of the check until the first batch was made."""
    data: str
    shape: tuple[int, ...]
    dtype: str
    tokens: int
    queue: tuple[int, int]
    """Batches that stood ready behind the first one, and how many may."""
    warmup: Warmup | None
    ledger: Mapping[str, float]
    """Seconds from the start of the process until each thing was there."""
    spent: Mapping[str, float]
    """How the time until the first batch was spent."""


def smoke(choice: Choice, timeout_s: float, begun: float | None = None) -> Smoke:
    """Get the first batch, or say within `timeout_s` why there is none. `begun`: since when, as of `perf_counter`."""
    begun = perf_counter() if begun is None else begun
    by = begun + timeout_s
    opening = Opening(lambda: _open(choice), _shut)
    try:
        try:
            dataset, loader = opening.result(max(0.0, by - perf_counter()))
        except LoaderTimeout:
            what = "it is still being opened: its files are being listed, or its vocabulary is being loaded"
            raise _late(choice, timeout_s, what) from None
        opened = perf_counter()
        warmup = _warm(choice, loader, by)
        try:
            batch = _first(choice, loader, by)
        except LoaderTimeout:
            raise _late(
                choice,
                timeout_s,
                f"it was opened, and the longest wait was for {_worst(loader, opened)}",
            ) from None
        return _seen(begun, dataset, loader, batch, warmup)
    finally:
        opening.close(1.0 if opening.done else 0.0)


def _open(choice: Choice) -> tuple[Any, AsyncDataLoader]:
    dataset = choice.make()
    return dataset, AsyncDataLoader(dataset, **choice.arguments()).start()


def _shut(opened: tuple[Any, AsyncDataLoader]) -> None:
    opened[1].shutdown()


def _warm(choice: Choice, loader: AsyncDataLoader, by: float) -> Warmup | None:
    """As the settings say, but not beyond the time."""
    settings = choice.settings
    allowed = min(settings["warmup_timeout"], max(0.0, by - perf_counter()))
    if not settings["warmup_batches"] or not allowed:
        return None
    return loader.warmup(settings["warmup_batches"], allowed)


def _first(choice: Choice, loader: AsyncDataLoader, by: float) -> Batch:
    left = max(0.0, by - perf_counter())
    inline = choice.arguments()["n_workers"] == 0
    batch = _made_here(loader, left) if inline else loader.next_batch(left)
    if batch is None:
        raise NoData(
            "the stream ended without a batch: all of the data is less than one. Use a smaller --batch."
        )
    return batch


def _made_here(loader: AsyncDataLoader, timeout_s: float) -> Batch | None:
    """Without threads nobody but the caller makes the batch, and it takes as long as it takes: on a thread after all."""
    opening = Opening(lambda: (loader.next_batch(),))
    try:
        return opening.result(timeout_s)[0]
    finally:
        opening.close(1.0 if opening.done else 0.0)


def _worst(loader: AsyncDataLoader, since: float) -> str:
    """What whoever makes the batches has waited for, in words."""
    makers = ("penstock-producer", "penstock-opening")
    tracks = [
        track
        for name in makers
        for track in loader.telemetry.clock.tracks
        if track.name.startswith(name)
    ]
    stage, what = (
        charge(tracks[0], since, perf_counter(), default="pack").worst()
        if tracks
        else ("its start", None)
    )
    return stage if what is None else f"{stage} of {getattr(what, 'path', what)}"


def _late(choice: Choice, timeout_s: float, what: str) -> LoaderTimeout:
    reached = f"See that {choice.server} can be reached, or allow" if choice.server else "Allow"
    return LoaderTimeout(
        f"no first batch within {timeout_s:g} s: {what}. {reached} more with --timeout."
    )


def _seen(
    begun: float, dataset: Any, loader: AsyncDataLoader, batch: Batch, warmup: Warmup | None
) -> Smoke:
    telemetry = loader.telemetry
    ready = next(
        fields for *_, msg, fields in telemetry.take_events() if msg.endswith("loader_ready")
    )
    return Smoke(
        first_batch_s=telemetry.ledger.marks["first_batch"] - begun,
        data=repr(dataset),
        shape=tuple(batch.inputs.shape),
        dtype=str(batch.inputs.dtype).removeprefix("torch."),
        tokens=batch.tokens,
        queue=telemetry.queue(),
        warmup=warmup,
        ledger=ready["ledger"],
        spent=ready["parts"],
    )
