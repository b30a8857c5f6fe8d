"""How much does a loader slow down the Python of the training loop?

Flat out:  the main thread counts while another thread takes batches as fast as they come. Beside
           it the same count while as many threads as there are workers hash memory, which needs
           cores and never the GIL: what busy cores alone cost. The kernel says how long the
           counting thread waited for a core; what is left is waiting for the GIL.
In step:   the main thread works for 50 ms in Python and takes a batch, over and over; the rate of
           its work is compared with taking batches from a list that was made before.

One process, all in turn. Loaders that are not being asked stand still: their queues are full.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, COPIES, SEQ_LEN, parser
from corpora import load_corpus
from record import Goal, Report
from rounds import calibrate, count, interleave, ratios, timed, wait_until_quiet

WORKERS = (1, 2)
STEP_S = 0.05


def core_wait_s() -> float:
    """How long this thread has waited for a core so far; nan where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return float("nan")


class Gate:
    """A thread that does something over and over while its gate is open, and stands still while it is not."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._open = threading.Event()
        self._ended = False
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._open.wait()
            if self._ended:
                return
            self._work()
            self.rounds += 1

    @contextmanager
    def opened(self, rounds: int) -> Iterator[None]:
        """Open it, and go on once it has done some rounds."""
        wanted = self.rounds + rounds
        self._open.set()
        while self.rounds < wanted:
            if not self._thread.is_alive():
                raise RuntimeError("the consuming thread failed; see its error above")
            time.sleep(0.001)
        try:
            yield
        finally:
            self._open.clear()

    def close(self) -> None:
        self._ended = True
        self._open.set()
        self._thread.join()


class Flat:
    """The main thread counts while gates are open."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.cpu_s: dict[str, list[float]] = {}
        self.core_s: dict[str, list[float]] = {}
        self.per_s: dict[str, list[float]] = {}

    def against(self, name: str, gates: list[Gate], rounds: int) -> Callable[[], float]:
        """Seconds that the count takes while these are at work."""

        def measure() -> float:
            wait_until_quiet()
            with ExitStack() as stack:
                for gate in gates:
                    stack.enter_context(gate.opened(rounds))
                done, cpu, core = sum(g.rounds for g in gates), time.thread_time(), core_wait_s()
                seconds = timed(lambda: count(self._n))
                self.cpu_s.setdefault(name, []).append(time.thread_time() - cpu)
                self.core_s.setdefault(name, []).append(core_wait_s() - core)
                self.per_s.setdefault(name, []).append(
                    (sum(g.rounds for g in gates) - done) / seconds
                )
            return seconds

        return measure


def flat_out(
    report: Report, loaders: dict[int, Any], repeats: int, seconds: float, ahead: int
) -> None:
    """`ahead`: batches taken before the count begins, so that the workers are at work and not the stock of chunks."""
    buffer = bytes(1 << 20)
    flat = Flat(calibrate(seconds))
    takers = {n: Gate(loader.__next__) for n, loader in loaders.items()}
    hashers = [Gate(lambda: hashlib.sha256(buffer)) for _ in range(max(WORKERS))]
    contenders = {"nothing": flat.against("nothing", [], 0)}
    for n in WORKERS:
        contenders[f"{n} hashing thread(s)"] = flat.against(
            f"{n} hashing thread(s)", hashers[:n], 5
        )
        contenders[f"loader, {n} worker(s)"] = flat.against(
            f"loader, {n} worker(s)", [takers[n]], ahead
        )
    took = interleave(repeats, contenders)
    wait_until_quiet()
    for gate in (*takers.values(), *hashers):
        gate.close()
    for name, values in took.items():
        case = f"flat out: {name}"
        report.add(case, "the count takes", values, "s")
        if name == "nothing":
            continue
        slower = [100 * (ratio - 1) for ratio in ratios(values, took["nothing"])]
        report.add(case, "slower by", slower, "%")
        cpu, core = flat.cpu_s[name], flat.core_s[name]
        report.add(
            case,
            "waiting for a core",
            [100 * c / v for c, v in zip(core, values, strict=True)],
            "% of wall",
        )
        gil = [100 * max(0.0, v - u - c) / v for v, u, c in zip(values, cpu, core, strict=True)]
        report.add(case, "waiting for the GIL", gil, "% of wall")
        if name.startswith("loader"):
            tokens = [rate * BATCH_SIZE * SEQ_LEN / 1e6 for rate in flat.per_s[name]]
            report.add(case, "the loader gives", tokens, "M tokens/s")


def in_step(
    report: Report, loaders: dict[int, Any], repeats: int, steps: int, step_s: float
) -> None:
    n = calibrate(step_s)
    made = [next(loaders[WORKERS[0]]) for _ in range(8)]
    sources: dict[str, Iterator[Any]] = {"a list of batches": itertools.cycle(made)}
    sources |= {f"loader, {w} worker(s)": iter(loaders[w]) for w in WORKERS}
    others_cpu: dict[str, list[float]] = {name: [] for name in sources}

    def working(name: str) -> Callable[[], float]:
        def measure() -> float:
            """Million counts a second, the taking of batches left out."""
            wait_until_quiet()
            worked = 0.0
            cpu = time.process_time() - time.thread_time()
            for _ in range(steps):
                worked += timed(lambda: count(n))
                next(sources[name])
            others_cpu[name].append(1e3 * (time.process_time() - time.thread_time() - cpu) / steps)
            return n * steps / worked / 1e6

        return measure

    rates = interleave(repeats, {name: working(name) for name in sources})
    for name, values in rates.items():
        case = f"in step, {1e3 * step_s:.0f} ms: {name}"
        report.add(case, "work", values, "M counts/s")
        if name.startswith("loader"):
            slower = [100 * (ratio - 1) for ratio in ratios(rates["a list of batches"], values)]
            report.add(case, "slower by", slower, "%", Goal("<", 2))
            report.add(case, "CPU of the other threads", others_cpu[name], "ms/step")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="steps a round, for the consumer in step")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 9)
    # A chunk of the corpus is some 90 batches: rounds are long enough for each to have one made.
    steps = args.steps or (5 if args.quick else 120)
    from penstock import AsyncDataLoader, TextDataset

    corpus = load_corpus(args.quick)
    settings = {
        "corpus": corpus.name,
        "batch": [BATCH_SIZE, SEQ_LEN],
        "steps": steps,
        "repeats": repeats,
    }
    report = Report("interference", args.quick, settings)
    with ExitStack() as stack:
        loaders = {}
        for n in WORKERS:
            data = TextDataset(corpus.copies(COPIES), tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
            loaders[n] = stack.enter_context(AsyncDataLoader(data, BATCH_SIZE, n_workers=n))
            for _ in range(20 if args.quick else 500):
                next(loaders[n])
        flat_out(report, loaders, repeats, 0.1 if args.quick else 1.0, 20 if args.quick else 600)
        in_step(report, loaders, repeats, steps, 0.01 if args.quick else STEP_S)
    report.close()


if __name__ == "__main__":
    main()
