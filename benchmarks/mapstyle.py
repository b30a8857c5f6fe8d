"""Measure the gain of workers for a map-style dataset, and their cost if there is no gain.

In step:    batches of 4, 16 and 64 whose load is 0.5, 0.4 and 0.3 of the compute time, and one of
            0.54. A timed wait simulates the accelerator. Sync is n_workers=0; async is 4 workers.
            Ideal is max(compute, load / workers) per step, from the sync times of the same round.
In memory:  rows in a list, with a matmul of about 5 ms on one core and with nothing between the
            batches: async against sync and against a DataLoader without workers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import common
from common import BATCH_SIZE, SEQ_LEN, Answer
from limit import torch_batches
from report import Report

IDS = 128
"""Ids of a slow sample."""
ROWS = 20_000
"""Rows in memory."""
ASYNC_WORKERS = 4
SHAPES = {
    # batch size, compute in seconds, load over compute
    "batch 4": (4, 0.02, 0.5),
    "batch 16": (16, 0.04, 0.4),
    "batch 64": (64, 0.08, 0.3),
    "slow load, batch 8": (8, 0.05, 0.54),
}


class Slow:
    """Slow samples: each waits for `seconds`."""

    def __init__(self, seconds: float) -> None:
        import numpy as np

        self._seconds = seconds
        self._row = np.arange(IDS)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(self._seconds * len(indices))
        return [self._row for _ in indices]


class RowPairs:
    """Rows of ids for PyTorch, as pairs of inputs and targets, which Penstock makes itself."""

    def __init__(self, rows: list[Any]) -> None:
        import torch

        self._rows, self._tensor = rows, torch.from_numpy

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return self._tensor(row[:-1]), self._tensor(row[1:])


@contextmanager
def penstock(data: Any, batch_size: int, workers: int) -> Iterator[Any]:
    from penstock import AsyncDataLoader

    with AsyncDataLoader(data, batch_size, shuffle=True, n_workers=workers) as loader:
        yield iter(loader)


def in_step(report: Report, name: str, repeats: int, seconds: float) -> None:
    """Measure a loop that computes and then takes a batch."""
    batch_size, compute_s, share = SHAPES[name]
    data = Slow(compute_s * share / batch_size)
    steps = max(2, round(seconds / compute_s))
    ways = {"sync": 0, "threads": ASYNC_WORKERS}
    seen: dict[str, list[Answer]] = {way: [] for way in ways}

    def measure(way: str) -> float:
        with penstock(data, batch_size, ways[way]) as batches:
            common.take_steps(batches, 3, lambda: time.sleep(compute_s))
            told = common.take_steps(batches, steps, lambda: time.sleep(compute_s))
        told["load"] = sum(told["fetches"])
        seen[way].append(told)
        return float(steps / told["wall"])

    rates = common.interleave(repeats, {way: partial(measure, way) for way in ways})
    case = f"{name}, load {share:g} of compute"
    computed = [told["wall"] - told["load"] for told in seen["sync"]]
    ideals = [
        steps / max(busy, told["load"] / ASYNC_WORKERS)
        for busy, told in zip(computed, seen["sync"], strict=True)
    ]
    for way, values in rates.items():
        walls = [told["wall"] for told in seen[way]]
        report.add(case, f"{way}, steps", values, "steps/s")
        used = [100 * busy / wall for busy, wall in zip(computed, walls, strict=True)]
        report.add(case, f"{way}, utilisation", used, "%")
        waits = [100 * told["load"] / told["wall"] for told in seen[way]]
        report.add(case, f"{way}, data wait", waits, "%")
        if way != "sync":
            gain = [100 * (r - 1) for r in common.ratios(values, rates["sync"])]
            report.add(case, f"{way}, improvement", gain, "%")
            report.add(case, f"{way} / ideal", common.ratios(values, ideals), "x")


def matmul(size: int) -> Callable[[], Any]:
    """Return work for one core outside Python."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.rand(size, size), torch.rand(size, size)
    return lambda: a @ b


def contend(case: Answer) -> None:
    """Run as a contender of the case in memory."""
    import numpy as np

    common.silence_warnings()
    rows: Any = list(np.random.default_rng(0).integers(0, 50257, (case["rows"], SEQ_LEN)))
    work = matmul(case["matmul"]) if case["matmul"] else lambda: None
    opened: Any = penstock(rows, BATCH_SIZE, case["workers"])
    if case["torch"]:
        opened = nullcontext(torch_batches(RowPairs(rows), 0))
    with opened as batches:
        common.take_steps(batches, case["steps"] // 4, work)
        common.serve(lambda: common.take_steps(batches, case["steps"], work))


def in_memory(report: Report, quick: bool, repeats: int) -> None:
    """Measure the case without a gain: data in memory."""
    took = min(common.timed(matmul(512)) for _ in range(9))
    size = int(512 * (0.005 / took) ** (1 / 3))
    for title, side, steps in (("a matmul of 5 ms", size, 100), ("no compute", 0, 2000)):
        base = {"rows": 500 if quick else ROWS, "matmul": side, "steps": 20 if quick else steps}
        cases = {
            "sync": base | {"torch": False, "workers": 0},
            "DataLoader, 0 workers": base | {"torch": True, "workers": 0},
            "async, 1 worker": base | {"torch": False, "workers": 1},
            "async, 2 workers": base | {"torch": False, "workers": 2},
        }
        rates = {
            name: [base["steps"] / answer["wall"] for answer in given]
            for name, given in common.measure_all(__file__, cases, repeats).items()
        }
        for name, values in rates.items():
            report.add(f"in memory, {title}", name, values, "steps/s")
        for name, under in itertools.product(list(rates)[2:], list(rates)[:2]):
            over = common.ratios(rates[name], rates[under])
            report.add(f"in memory, {title}", f"{name} / {under}", over, "x")


def main() -> None:
    options = common.parser(__doc__)
    parts = ("step", "memory")
    options.add_argument("--only", nargs="+", choices=parts, default=parts)
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    import torch  # noqa: F401 (else the first loader imports it, within the clock)

    common.silence_warnings()
    repeats = args.repeats or (1 if args.quick else 5)
    seconds = 0.05 if args.quick else 0.9
    report = Report("mapstyle", args.quick, {"repeats": repeats, "seconds": seconds})
    if "step" in args.only:
        for name in SHAPES:
            in_step(report, name, repeats, seconds)
    if "memory" in args.only:
        in_memory(report, args.quick, repeats)
    report.close()


if __name__ == "__main__":
    main()
