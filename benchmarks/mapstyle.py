"""What do workers gain for a dataset of the user's own, and what do they cost where there is nothing to gain?

Flat out:   samples that take 1, 5 and 20 ms each, of waiting (time.sleep) or of Python that holds
            the GIL (a loop, calibrated once, the same for all), 128 ids each. Penstock's threads and
            processes beside PyTorch's DataLoader, as many workers, within an epoch. What the end of
            an epoch costs, where DataLoader's default starts new workers, is measured apart.
In step:    the tables of two guides to an earlier loader. One: +50, +40, +30 % at batches of 4, 16, 64, which is what
            hiding a load of 0.5, 0.4, 0.3 of the compute time gives. The other: data wait of 30 to 40 %
            down to 0.2 %. An accelerator is stood in for by time.sleep: there is none here. Steps are
            shorter than theirs (80 ms and more), which is harder. The load of a batch is one wait or
            one piece of Python. Sync is n_workers=0, the plain path; async
            is 4 workers, prefetch 8. Ideal is max(compute, load / workers) a step, from the compute
            and load times that sync itself showed in that round.
In memory:  the null case. Rows that lie in memory, as a list of arrays and as one array of ids, with
            a matmul of about 5 ms on one core, and with nothing, between the batches: async against
            sync and against a DataLoader without workers. Each in a process of its own.

Flat out and in step, a loader is made for each measurement, and the clock starts after its first
batches; so no loader works while another is measured.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from record import Goal, Report
from rounds import Contender, interleave, ratios, serve
from samples import NULL_ROWS, Ids, Kind, Rows, WidenedIds, loops_per_s, slow

from common import BATCH_SIZE, SEQ_LEN, parser

FLAT_BATCH = 4
FLAT_WORKERS: dict[Kind, int] = {"waits": 4, "works": 2}
FLAT_GOAL = Goal(">=", 0.97)
ASYNC_WORKERS, ASYNC_PREFETCH = 4, 8
SHAPES = {
    # batch size, compute in ms, load over compute
    "guide, batch 4": (4, 20, 0.5),
    "guide, batch 16": (16, 40, 0.4),
    "guide, batch 64": (64, 80, 0.3),
    "slow load, batch 8": (8, 50, 0.54),
}
IDEAL_GOAL = Goal(">=", 0.97)
WAIT_GOAL = Goal("<", 0.2)
NULL_GOAL = Goal(">=", 0.97)
COMPUTE, NO_COMPUTE = "a matmul of 5 ms", "no compute"


# The datasets


@contextmanager
def penstock(
    data: Any, batch_size: int, workers: int, kind: str = "thread", prefetch: int = 8
) -> Iterator[Any]:
    """Batches of an endless stream."""
    from penstock import AsyncDataLoader

    given: Any = kind
    loader = AsyncDataLoader(
        data,
        batch_size,
        shuffle=True,
        n_workers=workers,
        workers=given,
        prefetch_size=prefetch,
        output="torch",
    )
    with loader:
        yield iter(loader)


@contextmanager
def dataloader(data: Any, batch_size: int, workers: int, persistent: bool = False) -> Iterator[Any]:
    """The same with PyTorch; what a user would write, pass after pass."""
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "This DataLoader will create"
        )  # more workers than cores: they mostly wait
        loader: Any = DataLoader(
            data, batch_size, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
        # Its workers end with its iterator, once the caller lets go of what it was given.
        yield itertools.chain.from_iterable(itertools.repeat(loader))


# Flat out


class FlatOut:
    """Samples a second, as fast as they come."""

    def __init__(self, report: Report, repeats: int, seconds: float, rate: float) -> None:
        self._report, self._repeats, self._seconds, self._rate = report, repeats, seconds, rate

    def steady(self, kind: Kind, ms: float) -> None:
        """Within an epoch."""
        workers = FLAT_WORKERS[kind]
        data = slow(kind, ms / 1e3, self._rate)
        # Workers that work in step hand over in step: only whole turns of all of them are counted.
        turns = max(1, round(self._seconds / (FLAT_BATCH * ms / 1e3)))
        opens: dict[str, Callable[[], Any]] = {
            "threads": lambda: penstock(data, FLAT_BATCH, workers),
            "processes": lambda: penstock(data, FLAT_BATCH, workers, "process"),
            "DataLoader": lambda: dataloader(data, FLAT_BATCH, workers),
        }
        rates = interleave(
            self._repeats,
            {name: self._rating(made, workers, turns) for name, made in opens.items()},
        )
        case = f"flat out, a sample {kind} {ms:g} ms, {workers} workers"
        for name, values in rates.items():
            self._report.add(case, name, values, "samples/s")
        for name in ("threads", "processes"):
            # Threads cannot share work that holds the GIL; that is what processes are for.
            goal = None if kind == "works" and name == "threads" else FLAT_GOAL
            self._report.add(
                case, f"{name} over DataLoader", ratios(rates[name], rates["DataLoader"]), "x", goal
            )

    @staticmethod
    def _rating(opens: Callable[[], Any], workers: int, turns: int) -> Callable[[], float]:
        def measure() -> float:
            with opens() as batches:
                for _ in range(2 * workers):
                    next(batches)
                begun = time.perf_counter()
                for _ in range(turns * workers):
                    next(batches)
                return turns * workers * FLAT_BATCH / (time.perf_counter() - begun)

        return measure

    def epoch_end(self, ms: float, batches: int) -> None:
        """What passing from one epoch to the next costs beyond the samples."""
        workers = FLAT_WORKERS["waits"]
        data = slow("waits", ms / 1e3, self._rate, length=FLAT_BATCH * batches)
        opens: dict[str, Callable[[], Any]] = {
            "threads": lambda: penstock(data, FLAT_BATCH, workers),
            "processes": lambda: penstock(data, FLAT_BATCH, workers, "process"),
            "DataLoader, default": lambda: dataloader(data, FLAT_BATCH, workers),
            "DataLoader, persistent workers": lambda: dataloader(
                data, FLAT_BATCH, workers, persistent=True
            ),
        }

        def costing(made: Callable[[], Any]) -> Callable[[], float]:
            def measure() -> float:
                with made() as source:
                    for _ in range(batches - workers):
                        next(source)
                    begun = time.perf_counter()
                    for _ in range(2 * workers):
                        next(source)
                    took = time.perf_counter() - begun
                    return 1e3 * took - 2 * FLAT_BATCH * ms

            return measure

        for name, values in interleave(
            self._repeats, {n: costing(made) for n, made in opens.items()}
        ).items():
            self._report.add(
                f"end of an epoch, a sample waits {ms:g} ms, {workers} workers", name, values, "ms"
            )


# In step


class InStep:
    """A loop that computes for a while, over and over, and takes a batch each time."""

    def __init__(self, report: Report, repeats: int, seconds: float, rate: float) -> None:
        self._report, self._repeats, self._seconds, self._rate = report, repeats, seconds, rate

    def shape(self, name: str, kind: Kind) -> None:
        batch_size, compute_ms, share = SHAPES[name]
        compute = compute_ms / 1e3
        data = slow(kind, compute * share / batch_size, self._rate, batches=True)
        steps = max(2, round(self._seconds / compute))
        kinds = ["threads"] if kind == "waits" else ["threads", "processes"]
        seen: dict[str, list[dict[str, float]]] = {which: [] for which in ("sync", *kinds)}

        def stepping(which: str) -> Callable[[], float]:
            workers = 0 if which == "sync" else ASYNC_WORKERS
            how = "process" if which == "processes" else "thread"

            def measure() -> float:
                with penstock(data, batch_size, workers, how, ASYNC_PREFETCH) as batches:
                    step(batches, 3, compute)
                    seen[which].append(step(batches, steps, compute))
                return 1 / seen[which][-1]["wall"]

            return measure

        rates = interleave(self._repeats, {which: stepping(which) for which in seen})
        self._show(
            f"{name}, load {share:g} of compute, {kind}",
            kinds,
            rates,
            seen,
            name.startswith("slow"),
        )

    def _show(
        self,
        case: str,
        kinds: list[str],
        rates: dict[str, list[float]],
        seen: dict[str, list[dict[str, float]]],
        waiting: bool,
    ) -> None:
        add, sync = self._report.add, seen["sync"]
        ideals = [1 / max(s["compute"], s["load"] / ASYNC_WORKERS) for s in sync]
        for which, values in rates.items():
            add(case, f"{which}, steps", values, "steps/s")
        add(case, "ideal improvement", [100 * (r - 1) for r in ratios(ideals, rates["sync"])], "%")
        for which in kinds:
            # In threads, Python that holds the GIL delays the loop itself.
            goals = which == "processes" or len(kinds) == 1
            gain = [100 * (r - 1) for r in ratios(rates[which], rates["sync"])]
            add(case, f"{which}, improvement", gain, "%")
            add(
                case,
                f"{which}, achieved of ideal",
                ratios(rates[which], ideals),
                "x",
                IDEAL_GOAL if goals else None,
            )
        for which, rounds in seen.items():
            # Of the accelerator's own time: a loop that comes back late because of the GIL has it idle too.
            used = [100 * own["compute"] / s["wall"] for own, s in zip(sync, rounds, strict=True)]
            add(case, f"{which}, utilisation", used, "%")
        for which, rounds in seen.items():
            goal = (
                WAIT_GOAL
                if waiting and which != "sync" and (which == "processes" or len(kinds) == 1)
                else None
            )
            add(
                case,
                f"{which}, data wait",
                [100 * s["load"] / s["wall"] for s in rounds],
                "%",
                goal,
            )


def step(batches: Iterator[Any], steps: int, compute: float) -> dict[str, float]:
    """Seconds a step: of all, of the compute's stand-in, and of waiting for the batch."""
    computed = 0.0
    begun = now = time.perf_counter()
    for _ in range(steps):
        next(batches)
        asked = time.perf_counter()
        time.sleep(compute)
        now = time.perf_counter()
        computed += now - asked
    wall = now - begun
    return {"wall": wall / steps, "compute": computed / steps, "load": (wall - computed) / steps}


# In memory


def in_memory(which: str, rows: int, torchs: bool) -> Any:
    """The data of a contender."""
    import numpy as np

    chance = np.random.default_rng(0)
    if which == "a list of rows":
        listed = list(chance.integers(0, 50257, (rows, SEQ_LEN)))
        return Rows(listed) if torchs else listed
    ids = chance.integers(0, 50257, rows * SEQ_LEN + 1, np.uint16)
    return WidenedIds(ids, SEQ_LEN) if torchs else Ids(ids, SEQ_LEN)


class Matmul:
    """Work of a core that is not Python's: one product of square matrices, about as long as asked."""

    def __init__(self, size: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._a, self._b = torch.rand(size, size), torch.rand(size, size)

    def __call__(self) -> None:
        _ = self._a @ self._b


def matmul_size(seconds: float) -> int:
    """The matrices whose product takes about so long on one core."""
    product, took = Matmul(512), []
    for _ in range(9):
        begun = time.perf_counter()
        product()
        took.append(time.perf_counter() - begun)
    return int(512 * (seconds / min(took)) ** (1 / 3))


def contend(case: dict[str, Any]) -> None:
    """Be one contender of the null case."""
    import torch

    torch.set_num_threads(1)
    data = in_memory(case["data"], case["rows"], torchs=case["what"] == "dataloader")
    with ExitStack() as stack:
        if case["what"] == "dataloader":
            batches = stack.enter_context(dataloader(data, BATCH_SIZE, 0))
        else:
            batches = stack.enter_context(penstock(data, BATCH_SIZE, case["workers"]))

        def rate(compute: Callable[[], None] | None, seconds: float) -> float:
            steps = 0
            begun = now = time.perf_counter()
            while now < begun + seconds:
                next(batches)
                if compute is not None:
                    compute()
                steps += 1
                now = time.perf_counter()
            return steps / (now - begun)

        def measure(seconds: float = case["seconds"]) -> dict[str, Any]:
            return {title: rate(compute, seconds) for title, compute in computes.items()}

        computes = {COMPUTE: Matmul(case["matmul"]), NO_COMPUTE: None}
        measure(case["seconds"] / 4)
        serve(measure)


def null_case(report: Report, quick: bool, repeats: int, seconds: float, rows: int) -> None:
    """Nothing to gain: the data is there."""
    contenders: dict[str, dict[str, Any]] = {
        "sync": {"what": "penstock", "workers": 0},
        "DataLoader, 0 workers": {"what": "dataloader"},
        "async, 1 worker": {"what": "penstock", "workers": 1},
        "async, 2 workers": {"what": "penstock", "workers": 2},
    }
    size = matmul_size(0.005)
    for data in ("a list of rows", "an array of ids"):
        given = {"data": data, "matmul": size, "seconds": seconds, "rows": rows}
        rates: dict[str, dict[str, list[float]]] = {
            t: {n: [] for n in contenders} for t in (COMPUTE, NO_COMPUTE)
        }
        with ExitStack() as stack:
            processes = {
                name: stack.enter_context(Contender(__file__, case | given, quick))
                for name, case in contenders.items()
            }

            def asking(
                name: str, process: Contender, into: dict[str, dict[str, list[float]]]
            ) -> Callable[[], float]:
                def measure() -> float:
                    answer = process.measure()
                    for title, rate in answer.items():
                        into[title][name].append(rate)
                    return float(answer[COMPUTE])

                return measure

            interleave(
                repeats,
                {name: asking(name, process.ready(), rates) for name, process in processes.items()},
            )
        for title, of in rates.items():
            case = f"in memory, {data}, {title}"
            for name, values in of.items():
                report.add(case, name, values, "steps/s", matmul=size)
            for name, under in itertools.product(list(of)[2:], list(of)[:2]):
                report.add(
                    case, f"{name} over {under}", ratios(of[name], of[under]), "x", NULL_GOAL
                )


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--seconds", type=float, help="how long each is measured in a round, about"
    )
    options.add_argument(
        "--only", nargs="+", choices=("flat", "step", "memory"), default=("flat", "step", "memory")
    )
    args = options.parse_args()
    logging.getLogger("penstock").setLevel(
        logging.ERROR
    )  # that the workers do not keep up is the point
    if args.contender is not None:
        contend(args.contender)
        return
    import torch  # noqa: F401 (else the first loader imports it, within the clock)

    repeats = args.repeats or (1 if args.quick else 3)
    seconds = args.seconds or (0.05 if args.quick else 0.9)
    rate = loops_per_s()
    settings = {"repeats": repeats, "seconds": seconds, "loops_per_ms": round(rate / 1e3)}
    report = Report("mapstyle", args.quick, settings)
    if "flat" in args.only:
        flat = FlatOut(report, repeats, seconds, rate)
        kinds: tuple[Kind, ...] = ("waits", "works")
        for kind, ms in itertools.product(kinds, (1,) if args.quick else (1, 5, 20)):
            flat.steady(kind, ms)
        flat.epoch_end(5, 12)
    if "step" in args.only:
        in_step = InStep(report, repeats, seconds, rate)
        for name in SHAPES:
            in_step.shape(name, "waits")
        in_step.shape("slow load, batch 8", "works")
    if "memory" in args.only:
        null_case(
            report,
            args.quick,
            repeats if args.quick else 2 * repeats,
            seconds / 2,
            500 if args.quick else NULL_ROWS,
        )
    report.close()


if __name__ == "__main__":
    main()
