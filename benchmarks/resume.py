"""Does a resume cost more than a fresh start, and what does a state weigh?

States are collected during one pass over the corpus, eight times under different names. Each
resume is a new loader, timed from load_state_dict() to its first batch, in turn with fresh starts;
the batch must be the one that followed in the first pass. Tokenizer instances are warm for all.
With shuffle a resume reads its window again, which late in an epoch is sixteen chunks, where a
fresh start begins with a window of one.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from typing import Any

from record import Goal, Report
from rounds import interleave, percentile, ratios, wait_until_quiet

from common import BATCH_SIZE, COPIES, SEQ_LEN, parser
from corpora import load_corpus

FRACTIONS = (0.01, 0.5, 0.99)
LANES = (1, 8)
CALLS = 10
"""Calls of state_dict() after each batch that it is timed at rest after."""


class Stream:
    """One stream over the corpus, from which loaders are made."""

    def __init__(self, data: Any, shuffle: bool, lanes: int) -> None:
        self._data, self._shuffle, self._lanes = data, shuffle, lanes
        self.states: list[dict[str, Any]] = []
        self.sums: list[int] = []
        self.taking_us: list[float] = []

    def loader(self) -> Any:
        from penstock import AsyncDataLoader

        return AsyncDataLoader(
            self._data,
            BATCH_SIZE,
            shuffle=self._shuffle,
            seed=7,
            lanes=self._lanes,
            epochs=1,
            output="numpy",
        )

    def pass_over(self, most: int | None = None) -> None:
        """Take a state after every batch, while the loader works as fast as it can."""
        with self.loader() as loader:
            for batch in loader:
                begun = time.perf_counter_ns()
                state = loader.state_dict()
                self.taking_us.append((time.perf_counter_ns() - begun) / 1e3)
                self.states.append(state)
                self.sums.append(zlib.crc32(batch.inputs))
                if len(self.states) == most:
                    break

    def at(self, fraction: float) -> int:
        """The batch after which that much of the pass is done; one more follows."""
        return min(len(self.states) - 2, max(0, round(fraction * len(self.states)) - 1))

    def first_batch(self, after: int | None) -> float:
        """Milliseconds to the first batch of a new loader, fresh or resumed after a batch."""
        loader = self.loader()
        begun = time.perf_counter()
        if after is not None:
            loader.load_state_dict(self.states[after])
        batch = next(loader)
        took = time.perf_counter() - begun
        loader.shutdown()
        number = 0 if after is None else after + 1
        if zlib.crc32(batch.inputs) != self.sums[number]:
            raise RuntimeError(f"a loader that resumed before batch {number} gave another batch")
        return 1e3 * took

    def take_at_rest(self, batches: int) -> list[float]:
        """Microseconds that state_dict() takes while the loader has nothing to do."""
        times = []
        with self.loader() as loader:
            for _ in range(batches):
                if next(loader, None) is None:
                    break
                wait_until_quiet()
                for _ in range(CALLS):
                    begun = time.perf_counter_ns()
                    loader.state_dict()
                    times.append((time.perf_counter_ns() - begun) / 1e3)
        return times


def main() -> None:
    args = parser(__doc__).parse_args()
    repeats = args.repeats or (2 if args.quick else 15)
    from penstock import TextDataset

    corpus = load_corpus(args.quick)
    copies = 2 if args.quick else COPIES
    report = Report(
        "resume", args.quick, {"corpus": corpus.name, "files": copies, "repeats": repeats}
    )
    data = TextDataset(corpus.copies(copies), tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
    for shuffle in (False, True):
        time_resumes(
            report, Stream(data, shuffle, lanes=1), f"shuffle {'on' if shuffle else 'off'}", repeats
        )
    for lanes in LANES:
        weigh_states(report, Stream(data, True, lanes), lanes, 20 if args.quick else 500)
    report.close()


def time_resumes(report: Report, stream: Stream, case: str, repeats: int) -> None:
    stream.pass_over()
    points: dict[str, int | None] = {"fresh": None}
    points |= {f"at {fraction:.0%}": stream.at(fraction) for fraction in FRACTIONS}

    def starting(after: int | None) -> Callable[[], float]:
        return lambda: stream.first_batch(after)

    for after in points.values():
        stream.first_batch(after)
    times = interleave(repeats, {name: starting(after) for name, after in points.items()})
    for name, values in times.items():
        report.add(
            case,
            f"first batch, {name}",
            values,
            "ms",
            batch=points[name],
            batches=len(stream.states),
        )
        if name != "fresh":
            report.add(
                case,
                f"of a fresh start, {name}",
                ratios(values, times["fresh"]),
                "x",
                Goal("<=", 1.3),
            )


def weigh_states(report: Report, stream: Stream, lanes: int, batches: int) -> None:
    case = f"state, {lanes} lane(s)"
    stream.pass_over(batches)
    sizes = [len(json.dumps(state)) for state in stream.states]
    report.add(case, "size", sizes, "bytes")
    report.add(
        case, "size for each lane", [size / lanes for size in sizes], "bytes", Goal("<=", 1000)
    )
    at_rest = stream.take_at_rest(-(-batches // CALLS))
    for when, times in (("at rest", at_rest), ("loader flat out", stream.taking_us)):
        report.add(
            case, f"state_dict(), {when}", times, "us", Goal("<=", 50), p99=percentile(times, 0.99)
        )
        report.add(case, f"state_dict(), {when}, p99", percentile(times, 0.99), "us")


if __name__ == "__main__":
    main()
