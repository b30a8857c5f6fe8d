"""How close to a bare loop do ids that were tokenized before become batches?

A file of random uint16 ids, memory-mapped and in the page cache, as (16, 1024) int64 inputs and
targets, torch tensors, all rows shuffled. The bare loop is what no loader can avoid: the order is
computed beforehand, and a batch is one gather of its rows and two copies that widen them. PyTorch's
DataLoader gets the dataset that nanoGPT's users write: a slice of an np.memmap, widened and wrapped,
sample by sample. It keeps its map, and its workers, from pass to pass.

Every contender has a process of its own and makes a pass over all rows first, so that its map is
filled in; the sum of the ids of that pass has to be the same for all. Then all are measured in
turn, flat out: nothing is done with a batch. Filling the pipeline and starting workers do not count.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, MB, SEQ_LEN, bench_folder, parser
from record import Goal, Report
from rounds import Contender, interleave, ratios, serve

BATCHES = 6104
"""In a pass: 200 MB of ids."""
BARE_GOAL = Goal(">=", 0.9)
DATALOADER_GOAL = Goal(">=", 5)

CASES: dict[str, dict[str, Any]] = {
    "bare loop": {"what": "bare"},
    "Penstock, 0 workers": {"what": "penstock", "workers": 0},
    "Penstock, 1 worker": {"what": "penstock", "workers": 1},
    "Penstock, 2 workers": {"what": "penstock", "workers": 2},
    "DataLoader, 0 workers": {"what": "dataloader", "workers": 0},
    "DataLoader, 2 workers": {"what": "dataloader", "workers": 2},
}

Pair = tuple[Any, Any]


def make_file(batches: int) -> Path:
    """Random ids, of which the rows fill so many batches exactly."""
    import numpy as np

    ids = batches * BATCH_SIZE * SEQ_LEN + 1
    path = bench_folder("tokens") / f"random-{ids}.bin"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            np.random.default_rng(0).integers(0, 50257, ids, np.uint16).tofile(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


# The contenders: each an endless stream of batches


def bare(path: Path) -> Iterator[Pair]:
    """Nothing but the copies: the order is known, the map is open."""
    import numpy as np
    import torch

    ids = np.memmap(path, np.uint16, "r")
    shape, strides = ((len(ids) - 1) // SEQ_LEN, SEQ_LEN + 1), (2 * SEQ_LEN, 2)
    # A plain array: np.memmap runs Python whenever it is indexed.
    rows = np.lib.stride_tricks.as_strided(np.asarray(ids), shape, strides, writeable=False)
    order = np.random.default_rng(0).permutation(len(rows)).reshape(-1, BATCH_SIZE)
    for batch in itertools.cycle(list(order)):
        gathered = rows[batch]
        inputs, targets = gathered[:, :-1].astype(np.int64), gathered[:, 1:].astype(np.int64)
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def penstock(path: Path, workers: int, stack: ExitStack) -> Iterator[Any]:
    from penstock import AsyncDataLoader, TokenFileDataset

    data = TokenFileDataset.from_binary_file(path, SEQ_LEN)
    loader = AsyncDataLoader(data, BATCH_SIZE, shuffle=True, n_workers=workers)
    return iter(stack.enter_context(loader))


class Slices:
    """nanoGPT's way: a slice of the map for each sample."""

    def __init__(self, path: Path) -> None:
        import numpy as np
        import torch

        self._ids = np.memmap(path, np.uint16, "r")
        self._int64, self._tensor = np.int64, torch.from_numpy

    def __len__(self) -> int:
        return (len(self._ids) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> Pair:
        at = index * SEQ_LEN
        return (
            self._tensor(self._ids[at : at + SEQ_LEN].astype(self._int64)),
            self._tensor(self._ids[at + 1 : at + 1 + SEQ_LEN].astype(self._int64)),
        )


def dataloader(path: Path, workers: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    data: Any = Slices(path)
    loader = DataLoader(
        data, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def contend(case: dict[str, Any], quick: bool) -> None:
    """Be one contender."""
    path = make_file(case["batches"])
    with ExitStack() as stack:
        source: Iterator[Any]
        if case["what"] == "bare":
            source = bare(path)
        elif case["what"] == "penstock":
            source = penstock(path, case["workers"], stack)
        else:
            source = dataloader(path, case["workers"])
        total = sum(
            int(inputs.sum()) + int(targets.sum())
            for inputs, targets in itertools.islice(source, case["batches"])
        )

        def measure() -> dict[str, Any]:
            batches, cpu = 0, time.process_time()
            begun = now = time.perf_counter()
            while now < begun + case["seconds"]:
                next(source)
                batches += 1
                now = time.perf_counter()
            cpu = time.process_time() - cpu
            return {"seconds": now - begun, "batches": batches, "cpu": cpu, "sum": total}

        serve(measure)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, help="how long each is measured in a round")
    args = options.parse_args()
    logging.getLogger("penstock").setLevel(
        logging.ERROR
    )  # that the workers do not keep up is the point
    if args.contender is not None:
        contend(args.contender, args.quick)
        return
    repeats = args.repeats or (2 if args.quick else 11)
    seconds = args.seconds or (0.05 if args.quick else 0.6)
    batches = 60 if args.quick else BATCHES
    size = make_file(batches).stat().st_size
    settings = {
        "file_mb": round(size / MB, 1),
        "batch": [BATCH_SIZE, SEQ_LEN],
        "repeats": repeats,
        "seconds": seconds,
    }
    report = Report("tokens", args.quick, settings)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with ExitStack() as stack:
        processes = {}
        for name, case in CASES.items():
            given = case | {"batches": batches, "seconds": seconds}
            processes[name] = stack.enter_context(Contender(__file__, given, args.quick))
        for process in processes.values():
            process.ready()

        def asking(name: str) -> Callable[[], float]:
            def measure() -> float:
                answer = processes[name].measure()
                answers[name].append(answer)
                return float(answer["batches"] / answer["seconds"] * BATCH_SIZE * SEQ_LEN / 1e6)

            return measure

        rates = interleave(repeats, {name: asking(name) for name in CASES})
    sums = {name: answer[0]["sum"] for name, answer in answers.items()}
    if len(set(sums.values())) > 1:
        raise RuntimeError(
            f"a pass has to give every row once, and the sums of the ids differ: {sums}"
        )
    compare(report, rates, answers)
    report.close()


def compare(
    report: Report, rates: dict[str, list[float]], answers: dict[str, list[dict[str, Any]]]
) -> None:
    """Rates, then what they are of the bare loop's and of the better DataLoader's, round by round."""
    best = [
        max(pair)
        for pair in zip(
            *(v for name, v in rates.items() if name.startswith("DataLoader")), strict=True
        )
    ]
    for name, values in rates.items():
        report.add(name, "rate", values, "M tokens/s")
        if not name.startswith("DataLoader"):  # whose workers' time is not in it
            cpu = [1e6 * answer["cpu"] / answer["batches"] for answer in answers[name]]
            report.add(name, "CPU, all threads", cpu, "us/batch")
        if name.startswith("Penstock"):
            goals = CASES[name]["workers"] > 0
            report.add(
                name,
                "of the bare loop",
                ratios(values, rates["bare loop"]),
                "x",
                BARE_GOAL if goals else None,
            )
            of_best = ratios(values, best)
            report.add(
                name, "of the better DataLoader", of_best, "x", DATALOADER_GOAL if goals else None
            )


if __name__ == "__main__":
    main()
