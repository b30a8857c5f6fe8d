"""How close to the limit of the machine does text become packed batches?

The limit is what no loader can avoid: decode and gigatoken alone, N threads, each with an instance
and open files of its own, and nothing done with the ids. The plain loop is what people write:
`tokenizers`, document by document, into a list that is cut into rows.

Every contender has a process of its own, all are measured in turn, and ratios are taken round by
round. The clock runs from start() of a new loader to its last batch, so filling and draining the
pipeline count. Tokens are the ids of the documents, without separators, on all sides; the loader's
must be exactly as many as the limit's.

Warm:  each tokenizer instance has seen the whole corpus.
Cold:  a fresh process, instances that are loaded and have seen no text, one pass over the corpus.
       What imports and vocabularies take to load is the question of start.py.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from common import BATCH_SIZE, COPIES, SEQ_LEN, Kind, parser
from corpora import Corpus, load_corpus
from limit import Limit, one_word
from record import Goal, Report
from rounds import Contender, interleave, ratios, serve

GOALS = {"parquet": Goal(">=", 0.85), "jsonl": Goal(">=", 0.7)}
PLAIN_GOAL = Goal(">=", 50)
EVERY = {"off": False, "on": True}


# The limit


# The loader


class Loader:
    """Penstock: a new loader for each measurement, all from one dataset, whose engine keeps its instances."""

    def __init__(
        self,
        corpus: Corpus,
        kind: Kind,
        workers: int,
        copies: int,
        passes: int,
        warm: bool,
        shuffle: bool,
    ) -> None:
        from penstock import AsyncDataLoader, TextDataset

        self._new = AsyncDataLoader
        self.dataset = TextDataset(
            corpus.copies(copies, kind), tokenizer=corpus.tokenizer, seq_len=SEQ_LEN
        )
        self.engine: Any = self.dataset.tokenizer.engine
        if self.engine.name != "gigatoken":
            raise RuntimeError(
                f"the loader would use {self.engine.name} for {corpus.tokenizer}: nothing to compare"
            )
        self._workers, self._passes, self._shuffle = workers, passes, shuffle
        self._see(corpus.texts() if warm else one_word(), workers)

    def _see(self, texts: Any, instances: int) -> None:
        """Have the engine load as many instances, and each of them see these texts."""
        for _ in range(self.engine.FIRST):  # until then it keeps to a single one
            self.engine.encode(one_word())
        taken = [self.engine._take() for _ in range(instances)]
        for instance in taken:
            self.engine._encode(instance, texts)
            self.engine._give_back(instance)

    def measure(self) -> dict[str, Any]:
        replaced = self.engine.replaced
        loader = self._new(
            self.dataset,
            BATCH_SIZE,
            shuffle=self._shuffle,
            n_workers=self._workers,
            epochs=self._passes,
        )
        cpu = time.process_time()
        begun = time.perf_counter()
        with loader:
            for _ in loader:
                pass
            seconds = time.perf_counter() - begun
            cpu = time.process_time() - cpu
            stats = loader.stats()
        # The last id is nobody's input, and each document that is not empty ends with a separator.
        ids = stats.tokens - stats.padded_tokens + 1 - (stats.documents - stats.empty)
        return {
            "seconds": seconds,
            "ids": ids,
            "process_cpu": cpu,
            "replaced": self.engine.replaced - replaced,
        }


class Ledger:
    """The same loader with its stages wrapped: the CPU time of each, on whichever thread it runs."""

    STAGES = ("decode + check", "tokenize", "encode", "pack + batch", "get", "next")

    def __init__(self, loader: Loader) -> None:
        from penstock.encode.deal import Batcher
        from penstock.feed.prefetch import Prefetcher

        from penstock.encode.engines import GigatokenEngine
        from penstock.encode.tokenizer import Tokenizer
        from penstock.loader import AsyncDataLoader
        from penstock.read.reader import Reader

        self._loader = loader
        self._spent: dict[str, float] = {}
        self._lock = threading.Lock()
        places = (
            (Reader, "read"), (GigatokenEngine, "encode"), (Tokenizer, "encode"), (Batcher, "next"),
            (Prefetcher, "get"), (AsyncDataLoader, "next_batch"),
        )  # fmt: skip
        for stage, (owner, name) in zip(self.STAGES, places, strict=True):
            setattr(owner, name, self._timed(getattr(owner, name), stage))

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - begun
                with self._lock:
                    self._spent[stage] += took

        return timed

    def measure(self) -> dict[str, Any]:
        self._spent = dict.fromkeys(self.STAGES, 0.0)
        run = self._loader.measure()
        spent = dict(self._spent)
        parts = {
            "decode + check": spent["decode + check"],
            "tokenize": spent["tokenize"],
            "separator + narrowing": spent["encode"] - spent["tokenize"],
            "pack + batch": spent["pack + batch"],
            "handing over": spent["get"],
            "rest of next()": spent["next"] - spent["get"],
        }
        parts["everything else"] = run["process_cpu"] - sum(parts.values())
        return run | {"cpu": parts}


# The plain loop


class Plain:
    """Read, encode each document, append to a list, cut rows."""

    def __init__(self, corpus: Corpus, documents: int) -> None:
        from tokenizers import Tokenizer

        self._path = corpus.parquet
        self._tokenizer = Tokenizer.from_file(str(corpus.tokenizer))
        eos = self._tokenizer.token_to_id("<|endoftext|>")
        if eos is None:
            raise RuntimeError(
                f"{corpus.tokenizer} has no <|endoftext|>, which the plain loop puts after each document"
            )
        self._eos = eos
        self._documents = documents

    def measure(self) -> dict[str, Any]:
        begun = time.perf_counter()
        total = sum(inputs.size for inputs, _ in self._batches()) + len(self._rest)
        return {"seconds": time.perf_counter() - begun, "ids": total - self._done}

    def _batches(self) -> Iterable[tuple[Any, Any]]:
        import numpy as np
        import pyarrow.parquet as pq

        buffer: list[int] = []
        wanted = BATCH_SIZE * SEQ_LEN
        self._done = 0
        for read in pq.ParquetFile(self._path).iter_batches(64, columns=["text"]):
            for text in read.column(0).to_pylist()[: self._documents - self._done]:
                buffer.extend(self._tokenizer.encode(text).ids)
                buffer.append(self._eos)
                self._done += 1
                while len(buffer) > wanted:
                    ids = np.array(buffer[: wanted + 1])
                    yield (
                        ids[:-1].reshape(BATCH_SIZE, SEQ_LEN),
                        ids[1:].reshape(BATCH_SIZE, SEQ_LEN),
                    )
                    del buffer[:wanted]
            if self._done >= self._documents:
                break
        self._rest = buffer


# Running


def contend(case: dict[str, Any], quick: bool) -> None:
    """Be one contender."""
    corpus = load_corpus(quick)
    what = case.pop("what")
    if what == "plain":
        serve(Plain(corpus, **case).measure)
    elif what == "limit":
        serve(Limit(corpus, **case).measure)
    elif what == "loader":
        serve(Loader(corpus, **case).measure)
    else:
        serve(Ledger(Loader(corpus, **case)).measure)


class Bench:
    """All of the comparisons, into one report."""

    def __init__(self, report: Report, quick: bool, repeats: int, documents: int) -> None:
        self._report = report
        self._quick = quick
        self._repeats = repeats
        self._size = {"copies": 1 if quick else COPIES, "passes": 1 if quick else 2}
        self._plain = {"what": "plain", "documents": documents}

    def warm(self, kind: Kind, workers: int) -> None:
        """Limit, loader and plain loop side by side, everything warmed up."""
        setting = {"kind": kind, "workers": workers, "warm": True, **self._size}
        cases: dict[str, dict[str, Any]] = {"limit": {"what": "limit", **setting}}
        cases |= {
            name: {"what": "loader", "shuffle": shuffle, **setting}
            for name, shuffle in EVERY.items()
        }
        if kind == "parquet":
            cases["plain"] = self._plain
        with ExitStack() as stack:
            processes = {
                name: stack.enter_context(self._contender(case)) for name, case in cases.items()
            }
            for process in processes.values():
                process.ready()
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
            rates = interleave(
                self._repeats, {name: self._asking(processes[name], answers[name]) for name in cases}
            )  # fmt: skip
        self._compare(f"{kind}, {workers} worker(s), warm", kind, rates, answers)

    def cold(self, kind: Kind, workers: int) -> None:
        """The first pass of a fresh process over text it has never seen."""
        setting = {"kind": kind, "workers": workers, "warm": False, "copies": 1, "passes": 1}
        cases: dict[str, dict[str, Any]] = {"limit": {"what": "limit", **setting}}
        cases |= {
            name: {"what": "loader", "shuffle": shuffle, **setting}
            for name, shuffle in EVERY.items()
        }
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}

        def fresh(name: str) -> Callable[[], float]:
            def measure() -> float:
                with self._contender(cases[name]) as process:
                    return self._asking(process.ready(), answers[name])()

            return measure

        rates = interleave(self._repeats, {name: fresh(name) for name in cases})
        self._compare(f"{kind}, {workers} worker(s), cold", kind, rates, answers, goals=False)

    def ledger(self, kind: Kind, workers: int) -> None:
        """Where the loader's CPU time goes, beside the limit's."""
        setting = {"kind": kind, "workers": workers, "warm": True, **self._size}
        cases: dict[str, dict[str, Any]] = {"limit": {"what": "limit", **setting}}
        cases["ledger"] = {"what": "ledger", "shuffle": True, **setting}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        with ExitStack() as stack:
            processes = {
                name: stack.enter_context(self._contender(case)) for name, case in cases.items()
            }
            for process in processes.values():
                process.ready()
            rounds = min(3, self._repeats)
            interleave(
                rounds, {name: self._asking(processes[name], answers[name]) for name in cases}
            )
        for name, title in (("limit", "limit"), ("ledger", "loader, shuffle on")):
            case = f"{kind}, {workers} worker(s), CPU of the {title}"
            for part in answers[name][0]["cpu"]:
                values = [1e9 * answer["cpu"][part] / answer["ids"] for answer in answers[name]]
                self._report.add(case, part, values, "ns/token")
            wall = [1e9 * answer["seconds"] * workers / answer["ids"] for answer in answers[name]]
            self._report.add(case, f"wall x {workers}", wall, "ns/token")

    def _contender(self, case: dict[str, Any]) -> Contender:
        return Contender(__file__, case, self._quick)

    @staticmethod
    def _asking(process: Contender, into: list[dict[str, Any]]) -> Callable[[], float]:
        def measure() -> float:
            answer = process.measure()
            into.append(answer)
            return float(answer["ids"] / answer["seconds"] / 1e6)

        return measure

    def _compare(
        self,
        case: str,
        kind: Kind,
        rates: dict[str, list[float]],
        answers: dict[str, list[dict[str, Any]]],
        goals: bool = True,
    ) -> None:
        unit = "M tokens/s"
        self._report.add(case, "limit", rates["limit"], unit)
        if "plain" in rates:
            self._report.add(case, "plain loop", rates["plain"], unit)
        for name in EVERY:
            produced, wanted = answers[name][0]["ids"], answers["limit"][0]["ids"]
            if produced != wanted:
                raise RuntimeError(
                    f"{case}: the loader gave {produced} ids, the limit {wanted}: they do not do the same"
                )
            replaced = statistics.median(answer["replaced"] for answer in answers[name])
            shuffle = f"shuffle {name}"
            self._report.add(
                case, f"loader, {shuffle}", rates[name], unit, instances_replaced_per_run=replaced
            )
            of_limit = ratios(rates[name], rates["limit"])
            self._report.add(
                case, f"of the limit, {shuffle}", of_limit, "x", GOALS[kind] if goals else None
            )
            if "plain" in rates:
                times = ratios(rates[name], rates["plain"])
                self._report.add(
                    case, f"of the plain loop, {shuffle}", times, "x", PLAIN_GOAL if goals else None
                )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", help="worker threads to measure with")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender, args.quick)
        return
    workers = args.workers or ([2] if args.quick else [1, 2])
    repeats = args.repeats or (1 if args.quick else 7)
    documents = 20 if args.quick else 300
    corpus = load_corpus(args.quick)
    settings = {
        "corpus": corpus.name,
        "batch": [BATCH_SIZE, SEQ_LEN],
        "repeats": repeats,
        "plain_documents": documents,
    }
    report = Report("throughput", args.quick, settings)
    bench = Bench(report, args.quick, repeats, documents)
    kinds: tuple[Kind, ...] = ("parquet", "jsonl")
    for kind in kinds:
        for copies in (1, COPIES):
            corpus.copies(copies, kind)  # made here, once, and not by several contenders
        for n in workers:
            bench.warm(kind, n)
    for n in workers:
        bench.cold("parquet", n)
        bench.ledger("parquet", n)
    bench.ledger("jsonl", workers[-1])
    report.close()


if __name__ == "__main__":
    main()
