"""Get one batch the way a training run does, within a time limit.

Everything (listing, vocabulary, workers, queue, first batch) runs on a background thread, because
a listing or a batch without prefetch takes as long as a server takes. Work that is still running
when the time is over ends with the program.
"""

from __future__ import annotations

from time import perf_counter

from penstock.errors import LoaderTimeout, NoData
from penstock.feed.opening import Opening
from penstock.loader import AsyncDataLoader
from penstock.tools.data_choice import DataChoice

SHUTDOWN_S = 1.0
"""Time for the loader to stop after the limit, before it is abandoned."""


def smoke(choice: DataChoice, timeout_s: float) -> str:
    """Return a report on the first batch, or raise within about `timeout_s` why there is none."""
    started: list[AsyncDataLoader] = []
    deadline = perf_counter() + timeout_s
    task = Opening(lambda: _first_batch(choice, deadline, started))
    try:
        return task.result(timeout_s + SHUTDOWN_S)
    except LoaderTimeout as error:
        why = "still listing the files or loading the vocabulary"
        if task.done:
            why = str(error)
        elif started:
            waiting = started[0].telemetry.waiting() or {"stage": "batch", "where": ""}
            why = f"the data was opened, then waiting for {waiting['stage']}, {waiting['where']}"
        allow = f"Check that {choice.server} can be reached, or allow" if choice.server else "Allow"
        raise LoaderTimeout(
            f"no first batch within {timeout_s:g} s: {why}. {allow} more time with --timeout."
        ) from None
    finally:
        task.close(SHUTDOWN_S if task.done else 0.0)


def _first_batch(choice: DataChoice, deadline: float, started: list[AsyncDataLoader]) -> str:
    arguments = dict(choice.arguments)
    wanted, warmup_s = arguments.pop("warmup_batches"), arguments.pop("warmup_timeout")
    dataset = choice.make()
    opened = perf_counter()
    with AsyncDataLoader(dataset, **arguments) as loader:
        started.append(loader)
        # Half of the time at most: `next_batch` needs some, to report what it waited for.
        warmup = loader.warmup(wanted, min(warmup_s, max(0.0, deadline - opened) / 2))
        asked = perf_counter()
        try:
            batch = loader.next_batch(max(0.0, deadline - asked))
        except LoaderTimeout:
            waited = loader.telemetry.blame(perf_counter() - asked)
            raise LoaderTimeout(f"the data was opened, then {waited}") from None
        if batch is None:
            raise NoData("the stream ended before its first batch. Use a smaller --batch.")
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
    lines.append("startup      seconds since the process began")
    startup = first.get("ledger", {})
    lines += [f"  {name.replace('_', ' '):<12} {s:8.3f}" for name, s in startup.items()]
    spent = sorted(first.get("parts", {}).items(), key=lambda item: -item[1])
    lines.append("spent        " + ", ".join(f"{part} {s:.3f}" for part, s in spent))
    return "\n".join(lines)
