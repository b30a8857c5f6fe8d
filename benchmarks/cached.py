"""How close to a bare copy do tokens from the cache become batches?

The token cache is filled from a loopback Hub, by a commit. Then the Hub is gone: a loader that would
ask for anything, or make a single chunk anew, stops the benchmark. All ids are written down besides,
in their order, as one file of uint16.

The bare copies read that file through a map and do nothing else: row by row into two int64 arrays
for each batch, which is what a batch is; the same, a whole batch with each call; and as uint16, which
is no batch yet, but all that has to be moved. They have no order to keep and hand nothing from one
thread to another, and they write into memory that was just freed and is still in the cores' caches. The
loader verifies the checksum of every chunk. Beside them the same loader tokenizes afresh from the
local disk, its tokenizer warm.

Every contender has a process of its own and makes a pass first, so that all is in the page cache; in
order, the sum of the ids of that pass has to be the same for all. Then all are measured in turn, flat
out, from start() of a loader to its last batch.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, COPIES, HOSTED, MB, REPOSITORY, SEQ_LEN, parser
from corpora import link, load_corpus
from hosted import Hub
from record import Goal, Report
from rounds import Contender, interleave, ratios, serve

DOCUMENTS = 500
"""In a row group: 3 MB of text, 1.4 MB of ids."""
FILLS = 10
"""Passes after which the cache has to be full: in each, what the disk is too slow for is left out."""
GOAL = Goal(">=", 0.85)

ROWS, WHOLE, NARROW = "bare copy, row by row", "bare copy, a batch at once", "bare copy, uint16"
FRESH = "afresh from disk"
ORDERS = {"in order": False, "shuffled": True}


# The bare copies: a pass is some batches


def by_rows(ids: Any) -> Iterator[Any]:
    import numpy as np

    shape = (BATCH_SIZE, SEQ_LEN)
    for first in range(0, len(ids) - 1, BATCH_SIZE * SEQ_LEN):
        inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        for row in range(BATCH_SIZE):
            at = first + row * SEQ_LEN
            inputs[row] = ids[at : at + SEQ_LEN]
            targets[row] = ids[at + 1 : at + 1 + SEQ_LEN]
        yield inputs, targets


def by_batches(ids: Any) -> Iterator[Any]:
    import numpy as np

    size, shape = BATCH_SIZE * SEQ_LEN, (BATCH_SIZE, SEQ_LEN)
    for at in range(0, len(ids) - 1, size):
        inputs = ids[at : at + size].astype(np.int64).reshape(shape)
        targets = ids[at + 1 : at + 1 + size].astype(np.int64).reshape(shape)
        yield inputs, targets


def narrow(ids: Any) -> Iterator[Any]:
    size = BATCH_SIZE * SEQ_LEN
    for at in range(0, len(ids) - 1, size):
        yield ids[at : at + size].copy(), None


COPIERS: dict[str, Callable[[Any], Iterator[Any]]] = {
    ROWS: by_rows,
    WHOLE: by_batches,
    NARROW: narrow,
}


class Bare:
    """One of the copies, over and over."""

    def __init__(self, copier: str, ids: str, passes: int) -> None:
        import numpy as np

        # A plain array: np.memmap runs Python whenever it is indexed.
        self._ids = np.asarray(np.memmap(ids, np.uint16, "r"))
        self._copy = COPIERS[copier]
        self._passes = passes
        self._sum = sum(int(inputs.sum()) for inputs, _ in self._copy(self._ids))

    def measure(self) -> dict[str, Any]:
        cpu, begun = time.process_time(), time.perf_counter()
        for _ in range(self._passes):
            for _ in self._copy(self._ids):
                pass
        seconds = time.perf_counter() - begun
        tokens = self._passes * (len(self._ids) - 1)
        return {
            "seconds": seconds,
            "tokens": tokens,
            "cpu": time.process_time() - cpu,
            "sum": self._sum,
        }


# The loader


class Loader:
    """Penstock: a new loader for each measurement, from one dataset."""

    def __init__(
        self, url: str, tokenizer: str, shuffle: bool, workers: int, cached: bool, passes: int
    ) -> None:
        from penstock import AsyncDataLoader, TextDataset

        self._new = AsyncDataLoader
        self._data = TextDataset(url, tokenizer=tokenizer, seq_len=SEQ_LEN, cache=cached)
        self._shuffle, self._workers, self._cached, self._passes = shuffle, workers, cached, passes
        with self.loader(1) as loader:
            self._sum = sum(int(batch.inputs.sum()) for batch in loader)

    def loader(self, epochs: int) -> Any:
        return self._new(
            self._data, BATCH_SIZE, shuffle=self._shuffle, n_workers=self._workers, epochs=epochs, drop_last=True,
        )  # fmt: skip

    def measure(self) -> dict[str, Any]:
        loader = self.loader(self._passes)
        cpu, begun = time.process_time(), time.perf_counter()
        with loader:
            for _ in loader:
                pass
            seconds = time.perf_counter() - begun
            cpu = time.process_time() - cpu
            stats = loader.stats()
        if self._cached and (stats.cache_misses or stats.requests):
            raise RuntimeError(
                f"{stats.cache_misses} chunks were made anew, with {stats.requests} requests: not the cache alone"
            )
        tokens = stats.tokens - stats.padded_tokens
        return {"seconds": seconds, "tokens": tokens, "cpu": cpu, "sum": self._sum}


class Fill:
    """Fills the cache, and writes down the ids."""

    def __init__(self, url: str, tokenizer: str, ids: str) -> None:
        self._loader = Loader(url, tokenizer, shuffle=False, workers=2, cached=True, passes=1)
        self._path = ids

    def measure(self) -> dict[str, Any]:
        for _ in range(FILLS):
            with self._loader.loader(1) as loader:
                for _ in loader:
                    pass
                stats = loader.stats()
            if stats.cache_misses == 0:
                return {"chunks": stats.cache_hits, "ids": self._write()}
        raise RuntimeError(
            f"after {FILLS} passes {stats.cache_misses} chunks are still missing in the cache: is the disk full or slow?"
        )

    def _write(self) -> int:
        import numpy as np

        written = 0
        with open(self._path, "wb") as file, self._loader.loader(1) as loader:
            for batch in loader:
                file.write(batch.inputs.astype(np.uint16).tobytes())
                written += batch.inputs.size
            file.write(batch.targets[-1, -1:].astype(np.uint16).tobytes())
        return written


def contend(case: dict[str, Any]) -> None:
    """Be one contender."""
    logging.getLogger("penstock").setLevel(
        logging.ERROR
    )  # that the workers do not keep up is the point
    os.environ |= case.pop("environment", {})
    what = case.pop("what")
    if what == "bare":
        serve(Bare(**case).measure)
    elif what == "fill":
        serve(Fill(**case).measure)
    else:
        serve(Loader(**case).measure)


# Running


def cases(loader: dict[str, Any], url: str, disk: str, ids: str, passes: int) -> dict[str, Any]:
    """Everyone who is measured."""
    found: dict[str, Any] = {
        name: {"what": "bare", "copier": name, "ids": ids, "passes": passes} for name in COPIERS
    }  # fmt: skip
    for order, shuffle in ORDERS.items():
        found[order] = loader | {"url": url, "shuffle": shuffle, "cached": True, "passes": passes}
        found[f"{FRESH}, {order}"] = loader | {
            "url": disk,
            "shuffle": shuffle,
            "cached": False,
            "passes": 1,
        }
    return found


def check(answers: dict[str, list[dict[str, Any]]]) -> None:
    """All have moved the same ids."""
    sums = {name: given[0]["sum"] for name, given in answers.items() if "shuffled" not in name}
    if len(set(sums.values())) > 1:
        raise RuntimeError(f"a pass in order has to give the same ids, and the sums differ: {sums}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=2, help="worker threads of the loaders")
    options.add_argument("--copies", type=int, help=f"files, each with the whole corpus ({COPIES})")
    options.add_argument("--passes", type=int, help="over the cached ids, in each measurement (4)")
    options.add_argument("--documents", type=int, default=DOCUMENTS, help="in a row group")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (2 if args.quick else 9)
    copies = args.copies or (2 if args.quick else COPIES)
    passes = args.passes or (1 if args.quick else 4)
    corpus = load_corpus(args.quick)
    hosted = corpus.hosted("zstd", args.documents)
    settings = {
        "corpus": corpus.name, "files": copies, "documents": args.documents, "workers": args.workers,
        "passes": passes, "batch": [BATCH_SIZE, SEQ_LEN], "repeats": repeats,
    }  # fmt: skip
    report = Report("cached", args.quick, settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept, ids, tokenizer = str(folder / "cache"), str(folder / "ids.bin"), str(corpus.tokenizer)
        with Hub(hosted, copies) as hub:
            url = f"hf://datasets/{REPOSITORY}@{hub.commit()}"
            environment = {"PENSTOCK_CACHE": kept, "HF_ENDPOINT": hub.endpoint}
            fill = {
                "what": "fill",
                "url": url,
                "tokenizer": tokenizer,
                "ids": ids,
                "environment": environment,
            }
            with Contender(__file__, fill, args.quick) as process:
                filled = process.ready().measure()
        disk = folder / "disk"
        disk.mkdir()
        for i in range(copies):
            link(hosted / HOSTED, disk / f"{i:02}.parquet")
        # By the Hub's address, under which the listing is kept. Nobody is there any more: a request would fail.
        loader = {
            "what": "loader",
            "tokenizer": tokenizer,
            "workers": args.workers,
            "environment": environment,
        }
        everyone = cases(loader, url, str(disk), ids, passes)
        processes = {
            name: stack.enter_context(Contender(__file__, case, args.quick)) for name, case in everyone.items()
        }  # fmt: skip
        for process in processes.values():
            process.ready()
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in everyone}

        def asking(name: str) -> Callable[[], float]:
            def measure() -> float:
                answer = processes[name].measure()
                answers[name].append(answer)
                return float(answer["tokens"] / answer["seconds"] / 1e6)

            return measure

        rates = interleave(repeats, {name: asking(name) for name in everyone})
    check(answers)
    report.add("cache", "chunks", filled["chunks"], "")
    report.add("cache", "ids", 2 * filled["ids"] / MB, "MB")
    compare(report, rates, answers)
    report.close()


def compare(
    report: Report, rates: dict[str, list[float]], answers: dict[str, list[dict[str, Any]]]
) -> None:
    """Rates, then what those of the cache are of a bare copy, and of tokenizing."""
    for name, values in rates.items():
        case = f"from the cache, {name}" if name in ORDERS else name
        report.add(case, "rate", values, "M tokens/s")
        report.add(
            case,
            "CPU, all threads",
            [1e9 * a["cpu"] / a["tokens"] for a in answers[name]],
            "ns/token",
        )
        if name not in ORDERS:
            continue
        for bare in COPIERS:
            goal = GOAL if bare == ROWS else None
            report.add(case, f"of the {bare}", ratios(values, rates[bare]), "x", goal)
        report.add(case, "of tokenizing afresh", ratios(values, rates[f"{FRESH}, {name}"]), "x")


if __name__ == "__main__":
    main()
