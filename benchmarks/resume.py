"""Does a resume take longer than a fresh start, and how large is a state?

States are collected during one pass over the corpus. Each resume is a new loader, timed from
load_state_dict() to its first batch, in turn with fresh starts. Its batch has to be the one that
followed in the first pass. Tokenizers are warm for all.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from typing import Any

from common import BATCH_SIZE, COPIES, SEQ_LEN, interleave, parser, ratios, silence_warnings
from corpora import load_corpus
from report import Goal, Report

FRACTIONS = (0.01, 0.5, 0.99)
LANES = (1, 8)


class Stream:
    """One stream over the corpus, from which loaders are made."""

    def __init__(self, data: Any, shuffle: bool, lanes: int) -> None:
        self._data, self._shuffle, self._lanes = data, shuffle, lanes
        self.states: list[dict[str, Any]] = []
        self.sums: list[int] = []
        self.state_dict_us: list[float] = []

    def loader(self) -> Any:
        from penstock import AsyncDataLoader

        order = {"shuffle": self._shuffle, "lanes": self._lanes, "seed": 7, "epochs": 1}
        return AsyncDataLoader(self._data, BATCH_SIZE, **order)  # type: ignore[arg-type]

    def read(self, most: int | None = None) -> None:
        """Take a state after every batch."""
        with self.loader() as loader:
            for batch in loader:
                begun = time.perf_counter()
                self.states.append(loader.state_dict())
                self.state_dict_us.append(1e6 * (time.perf_counter() - begun))
                self.sums.append(checksum(batch))
                if len(self.states) == most:
                    break

    def first_batch_ms(self, after: int | None) -> float:
        """Return the time to the first batch of a new loader, fresh or resumed after a batch."""
        loader = self.loader()
        begun = time.perf_counter()
        if after is not None:
            loader.load_state_dict(self.states[after])
        batch = next(loader)
        took = time.perf_counter() - begun
        loader.shutdown()
        number = 0 if after is None else after + 1
        if checksum(batch) != self.sums[number]:
            raise RuntimeError(f"a loader that resumed before batch {number} gave another batch")
        return 1e3 * took


def checksum(batch: Any) -> int:
    import numpy as np

    return zlib.crc32(np.asarray(batch.inputs).tobytes())


def time_resumes(report: Report, stream: Stream, case: str, repeats: int) -> None:
    stream.read()
    batches = len(stream.states)
    points: dict[str, int | None] = {"fresh": None}
    for fraction in FRACTIONS:
        points[f"at {fraction:.0%}"] = min(batches - 2, max(0, round(fraction * batches) - 1))

    def starting(after: int | None) -> Callable[[], float]:
        return lambda: stream.first_batch_ms(after)

    for after in points.values():
        stream.first_batch_ms(after)
    times = interleave(repeats, {name: starting(after) for name, after in points.items()})
    for name, values in times.items():
        report.add(case, f"first batch, {name}", values, "ms", batches=batches)
        if name != "fresh":
            over = ratios(values, times["fresh"])
            report.add(case, f"{name} / fresh", over, "x", Goal("<=", 1.3))


def main() -> None:
    args = parser(__doc__).parse_args()
    silence_warnings()
    repeats = args.repeats or (2 if args.quick else 15)
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    from penstock import TextDataset

    corpus = load_corpus(args.quick)
    copies = 2 if args.quick else COPIES
    settings = {"corpus": corpus.name, "files": copies, "repeats": repeats}
    report = Report("resume", args.quick, settings)
    data = TextDataset(corpus.copies(copies), tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
    for case, shuffle in (("in order", False), ("shuffled", True)):
        time_resumes(report, Stream(data, shuffle, lanes=1), case, repeats)
    for lanes in LANES:
        stream = Stream(data, True, lanes)
        stream.read(20 if args.quick else 500)
        sizes = [len(json.dumps(state)) / lanes for state in stream.states]
        report.add(f"state, {lanes} lane(s)", "size a lane", sizes, "bytes", Goal("<=", 1000))
        report.add(f"state, {lanes} lane(s)", "state_dict()", stream.state_dict_us, "µs")
    report.close()


if __name__ == "__main__":
    main()
