"""Fetch one batch the way a training run does, within a time limit.

Everything (listing, vocabulary, workers, queue, first batch) runs on a background thread, because a
listing or a batch without prefetch may wait for a server without limit. Work that is still running
after the time limit ends with the program.
"""

from __future__ import annotations

from time import perf_counter

from penstock.errors import LoaderTimeout, SourceError
from penstock.feed.fallback import BackgroundOpen
from penstock.loader import AsyncDataLoader
from penstock.tools.data_choice import DataChoice


def smoke(choice: DataChoice, timeout_s: float) -> str:
    """Return a report on the first batch. Raise within about `timeout_s` if there is none."""
    started: list[AsyncDataLoader] = []
    task = BackgroundOpen(lambda: _first_batch(choice, timeout_s, started))
    try:
        return task.result(timeout_s)
    except LoaderTimeout:
        why = "still listing the files or loading the vocabulary"
        if started:
            waiting = started[0].telemetry.waiting() or {"stage": "batch", "where": ""}
            why = f"the data was opened, then waiting for {waiting['stage']}, {waiting['where']}"
        raise LoaderTimeout(
            f"no first batch within {timeout_s:g} s: {why}. Check that the server can be reached "
            "(HF_ENDPOINT, proxies), or allow more time with --timeout."
        ) from None
    finally:
        task.close()


def _first_batch(choice: DataChoice, timeout_s: float, started: list[AsyncDataLoader]) -> str:
    arguments = dict(choice.arguments)
    wanted, warmup_s = arguments.pop("warmup_batches"), arguments.pop("warmup_timeout")
    opened = perf_counter()
    dataset = choice.make()
    with AsyncDataLoader(dataset, **arguments) as loader:
        started.append(loader)
        # At most half of the time, because only `next_batch` can report what it waits for.
        left_s = max(0.0, opened + timeout_s - perf_counter())
        warmup = loader.warmup(wanted, min(warmup_s, left_s / 2))
        batch = loader.next_batch()
        if batch is None:
            raise SourceError("the stream ended before its first batch. Use a smaller --batch.")
        ready, capacity = loader.telemetry.queue()
        first = loader.telemetry.first
    shape, dtype = " x ".join(map(str, batch.inputs.shape)), str(batch.inputs.dtype)
    queue = f"{ready} ready, prefetch keeps {capacity}" if capacity else "none: prefetch is off"
    lines = [
        f"[smoke][OK] first batch in {first.get('dt', perf_counter() - opened):.2f}s",
        f"data         {choice.name}: {dataset!r}",
        f"batch        {shape} {dtype.removeprefix('torch.')}, {batch.tokens:,} tokens",
        f"queue        {queue}",
    ]
    if warmup.requested:
        filled = f"{warmup.filled} of {warmup.requested} batches"
        lines.append(f"warmup       {filled} in {warmup.wait_ms / 1e3:.2f} s")
    lines.append("startup      when each step was reached, in seconds since the process began")
    for name, s in first.get("reached", {}).items():
        lines.append(f"  {name.replace('_', ' '):<12} {s:8.3f}")
    spent = sorted(first.get("parts", {}).items(), key=lambda item: -item[1])
    stages = ", ".join(f"{part} {s:.3f}" for part, s in spent)
    lines.append(f"spent        seconds in each stage: {stages}")
    return "\n".join(lines)
