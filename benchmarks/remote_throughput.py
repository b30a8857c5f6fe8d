"""How much of the link becomes batches, where the text is on the Hub?

A loopback Hub with 50 ms before each answer and 125 MB/s (1 Gbit/s) for all connections together.
One epoch over a fixed number of whole files, without a token cache and with nothing on disk of
earlier runs, so footers are fetched too. The rate counts the bytes of the text column as they are
in the files, from start() of a loader to its last batch. What was fetched is what the Hub's log says
that its second port sent, also in answers that nobody waited for any more; what was needed is what
the footers say of the text column.

Beside it, with the same files and the same settings:
    a plain downloader: the same ranges by as many threads, from http.client into a buffer, not
        decoded. More than that the Hub, the latency and so many requests in flight do not give.
    the local disk: the same loader with files in the page cache. More than that the cores do not give.
    a second Hub, where 1 % of all requests fail, are reset, stall or are late.

The Hub is a process of its own, but has to share the cores with the loader: it takes about a third
of one at 125 MB/s, which the local disk does not. So with two cores the machine is often the limit,
above all where the files are compressed: a megabyte of the link is then two or three of text.
"cores" tells who was busy, and "of the nearest limit" compares with the lowest of link, downloader and disk.
"""

from __future__ import annotations

import http.client
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hosted import Hub
from record import Goal, Report
from rounds import Contender, interleave, ratios, serve

from common import BATCH_SIZE, HOSTED, MB, REPOSITORY, SEQ_LEN, parser
from corpora import link, load_corpus, text_ranges

DOCUMENTS = 500
"""In a row group: 3 MB of text."""
FAULTS = ("--fault-rate", "0.01", "--fault-kinds", "status,slow,reset,stall")
FETCHED_GOAL = Goal("<=", 1.02)

DOWNLOADER, IN_ORDER, SHUFFLED, FAULTY = (
    "plain downloader",
    "in order",
    "shuffled",
    "in order, 1 % faults",
)
DISK_IN_ORDER, DISK_SHUFFLED = "local disk, in order", "local disk, shuffled"
NEAREST = {IN_ORDER: DISK_IN_ORDER, SHUFFLED: DISK_SHUFFLED, FAULTY: DISK_IN_ORDER}
"""What reads from the Hub, and what does the same from disk."""
LINK_GOALS = {IN_ORDER: Goal(">=", 0.9), SHUFFLED: Goal(">=", 0.9), FAULTY: Goal(">=", 0.8)}


# The contenders


class Loader:
    """Penstock: a new loader for each measurement, from one dataset."""

    def __init__(
        self, url: str, tokenizer: str, shuffle: bool, fetches: int, documents: int
    ) -> None:
        # Before anything is imported: where listings and footers are kept.
        self._kept = tempfile.mkdtemp(prefix="penstock-bench-")
        os.environ["PENSTOCK_CACHE"] = self._kept
        from penstock import AsyncDataLoader, Remote, TextDataset

        self._new = AsyncDataLoader
        self._shuffle = shuffle
        self._documents = documents
        self._data = TextDataset(
            url, tokenizer=tokenizer, seq_len=SEQ_LEN, cache=False, remote=Remote(fetches=fetches)
        )
        with self._loader() as loader:  # all imports are made, and the vocabulary is loaded
            next(loader)

    def _loader(self) -> Any:
        return self._new(
            self._data, BATCH_SIZE, shuffle=self._shuffle, epochs=1, output="numpy", report_docs=0
        )  # fmt: skip

    def measure(self) -> dict[str, Any]:
        self.close()  # no footer of an earlier run
        cpu, begun = time.process_time(), time.monotonic()
        with self._loader() as loader:
            for _ in loader:
                pass
            ended = time.monotonic()
            cpu = time.process_time() - cpu
            stats = loader.stats()
        if stats.documents != self._documents:
            raise RuntimeError(
                f"{stats.documents} documents were read, there are {self._documents}"
            )
        counts = {
            "hedges": stats.hedges,
            "retry_wait_ms": stats.retry_wait_ms,
            "faults": stats.faults,
        }
        return {"begun": begun, "ended": ended, "cpu": cpu, "counts": counts}

    def close(self) -> None:
        if os.path.exists(self._kept):
            shutil.rmtree(self._kept)


class Downloader:
    """The same ranges on as many threads. Addresses are asked for ahead of them, once a file, by a thread of their own."""

    def __init__(self, endpoint: str, file: str, files: int, fetches: int) -> None:
        self._endpoint = endpoint
        self._ranges = [
            (name, *span) for name in hosted_names(files) for span in text_ranges(Path(file))
        ]
        self._fetches = fetches
        self._addresses: dict[str, Future[str]] = {}
        self._own = threading.local()

    def measure(self) -> dict[str, Any]:
        cpu, begun = time.process_time(), time.monotonic()
        with ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(self._fetches) as pool:
            names = dict.fromkeys(name for name, _, _ in self._ranges)
            self._addresses = {name: ahead.submit(self._resolve, name) for name in names}
            for _ in pool.map(self._fetch, self._ranges):
                pass
        ended = time.monotonic()
        return {"begun": begun, "ended": ended, "cpu": time.process_time() - cpu, "counts": {}}

    def _resolve(self, name: str) -> str:
        reply = self._ask(f"{self._endpoint}/datasets/{REPOSITORY}/resolve/main/{name}", {}, 302)
        reply.read()
        return str(reply.headers["Location"])

    def _fetch(self, part: tuple[str, int, int]) -> None:
        name, start, length = part
        asked = {"Range": f"bytes={start}-{start + length - 1}"}
        reply = self._ask(self._addresses[name].result(), asked, 206)
        if not hasattr(self._own, "buffer") or len(self._own.buffer) < length:
            self._own.buffer = bytearray(length)
        left = memoryview(self._own.buffer)[:length]
        while left:
            n = reply.readinto(left)
            if n == 0:
                raise RuntimeError(f"{name}: {len(left)} bytes are missing")
            left = left[n:]

    def _ask(self, url: str, headers: dict[str, str], status: int) -> http.client.HTTPResponse:
        """Over the thread's own connection to that server."""
        parts = urlsplit(url)
        if not hasattr(self._own, "open"):
            self._own.open = {}
        connection = self._own.open.setdefault(
            parts.netloc, http.client.HTTPConnection(parts.netloc, timeout=60)
        )
        connection.request(
            "GET", f"{parts.path}?{parts.query}" if parts.query else parts.path, headers=headers
        )
        reply: http.client.HTTPResponse = connection.getresponse()
        if reply.status != status:
            raise RuntimeError(f"{parts.path}: {reply.status} instead of {status}")
        return reply

    def close(self) -> None:
        """Connections end with their threads."""


def hosted_names(files: int) -> list[str]:
    """How the Hub names the copies of its file."""
    return [f"data/train-{i:05d}-of-{files:05d}.parquet" for i in range(files)]


def contend(case: dict[str, Any]) -> None:
    """Be one contender."""
    logging.getLogger("penstock").setLevel(
        logging.ERROR
    )  # that the workers do not keep up is the point
    what = case.pop("what")
    if "endpoint" in case:
        os.environ["HF_ENDPOINT"] = case["endpoint"]
    if what == "loader":
        case.pop("endpoint", None)
        contender: Loader | Downloader = Loader(**case)
    else:
        contender = Downloader(**case)
    try:
        serve(contender.measure)
    finally:
        contender.close()


# Running


class Bench:
    """One kind of files: everything that reads them, in turn."""

    def __init__(self, report: Report, args: Any, repeats: int, compression: str) -> None:
        import pyarrow.parquet as pq

        self._report = report
        self._args = args
        self._repeats = repeats
        self._compression = compression
        corpus = load_corpus(args.quick)
        self._folder = corpus.hosted(compression, args.documents)
        self._file = self._folder / HOSTED
        column = sum(length for _, length in text_ranges(self._file))
        self._files = max(2, round(args.mb * MB / column))
        self._column_bytes = column * self._files
        self._documents = pq.read_metadata(self._file).num_rows * self._files
        self._tokenizer = str(corpus.tokenizer) if args.tokenizer == "bpe" else args.tokenizer

    def run(self) -> None:
        link = [
            "--latency-ms",
            str(self._args.latency_ms),
            "--bandwidth-mb",
            str(self._args.bandwidth_mb),
        ]
        answers: dict[str, list[dict[str, Any]]] = {}
        with ExitStack() as hubs:
            hub = hubs.enter_context(Hub(self._folder, self._files, *link))
            faulty = hubs.enter_context(
                Hub(self._folder, self._files, *link, *FAULTS, "--seed", str(self._args.seed))
            )
            with ExitStack() as stack:
                disk = stack.enter_context(tempfile.TemporaryDirectory())
                cases = self._cases(hub.endpoint, faulty.endpoint, self._copies(Path(disk)))
                processes = {
                    name: stack.enter_context(Contender(__file__, case, self._args.quick))
                    for name, case in cases.items()
                }
                for process in processes.values():
                    process.ready()
                answers = {name: [] for name in cases}
                asking = {
                    name: self._asking(
                        processes[name], faulty if name == FAULTY else hub, answers[name]
                    )
                    for name in cases
                }
                rates = interleave(self._repeats, asking)
        self._compare(rates, answers, hub, faulty)

    def _copies(self, folder: Path) -> str:
        """The files as the Hub has them, on disk."""
        for name in hosted_names(self._files):
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            link(self._file, path)
        return str(folder)

    def _cases(self, endpoint: str, faulty: str, disk: str) -> dict[str, dict[str, Any]]:
        url = f"hf://datasets/{REPOSITORY}"
        loader: dict[str, Any] = {
            "what": "loader", "url": url, "tokenizer": self._tokenizer, "fetches": self._args.fetches,
            "documents": self._documents, "endpoint": endpoint, "shuffle": False,
        }  # fmt: skip
        return {
            DOWNLOADER: {
                "what": "downloader", "endpoint": endpoint, "file": str(self._file), "files": self._files,
                "fetches": self._args.fetches,
            },
            IN_ORDER: loader,
            SHUFFLED: loader | {"shuffle": True},
            FAULTY: loader | {"endpoint": faulty},
            DISK_IN_ORDER: loader | {"url": disk},
            DISK_SHUFFLED: loader | {"url": disk, "shuffle": True},
        }  # fmt: skip

    def _asking(
        self, process: Contender, hub: Hub, into: list[dict[str, Any]]
    ) -> Callable[[], float]:
        def measure() -> float:
            before = hub.cpu_s()
            answer = process.measure()
            seconds = answer["ended"] - answer["begun"]
            into.append(answer | {"seconds": seconds, "hub_cpu": hub.cpu_s() - before})
            return float(self._column_bytes / seconds / MB)

        return measure

    def _compare(
        self,
        rates: dict[str, list[float]],
        answers: dict[str, list[dict[str, Any]]],
        hub: Hub,
        faulty: Hub,
    ) -> None:
        link = float(self._args.bandwidth_mb)
        add = self._report.add
        for name, values in rates.items():
            case = f"{self._compression}: {name}"
            add(case, "text column", values, "MB/s")
            add(case, "cores, its own", [a["cpu"] / a["seconds"] for a in answers[name]], "")
            if name in (DISK_IN_ORDER, DISK_SHUFFLED):
                continue
            add(case, "cores, the Hub's", [a["hub_cpu"] / a["seconds"] for a in answers[name]], "")
            add(case, "of the link", [value / link for value in values], "x", LINK_GOALS.get(name))
            if name in NEAREST:
                add(case, "of the plain downloader", ratios(values, rates[DOWNLOADER]), "x")
                add(case, "of the local disk", ratios(values, rates[NEAREST[name]]), "x")
                lowest = [
                    min(link, a, b)
                    for a, b in zip(rates[DOWNLOADER], rates[NEAREST[name]], strict=True)
                ]
                add(case, "of the nearest limit", ratios(values, lowest), "x")
            self._account(case, name, answers[name], faulty if name == FAULTY else hub)

    def _account(self, case: str, name: str, answers: list[dict[str, Any]], hub: Hub) -> None:
        """What the Hub was asked for, and what it sent."""
        each = [hub.between(answer["begun"], answer["ended"]) for answer in answers]
        sent = [sum(r["sent"] for r in requests if r["port"] == "cdn") for requests in each]
        goal = FETCHED_GOAL if name in (IN_ORDER, SHUFFLED) else None
        of_column = [total / self._column_bytes for total in sent]
        counts = [answer["counts"] for answer in answers]
        self._report.add(
            case, "bytes fetched of the text column's", of_column, "x", goal, counts=counts
        )
        self._report.add(case, "requests", [len(requests) for requests in each], "")
        if name == FAULTY:
            struck = [sum(bool(r["fault"]) for r in requests) for requests in each]
            kinds = [sorted(r["fault"] for r in requests if r["fault"]) for requests in each]
            self._report.add(case, "requests that a fault struck", struck, "", kinds=kinds)
        if counts[0]:
            self._report.add(case, "hedges", [float(count["hedges"]) for count in counts], "")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mb", type=float, help="of the text column, in each measurement (400)")
    options.add_argument(
        "--compression",
        nargs="+",
        default=["none", "snappy"],
        help="of the files: none snappy zstd",
    )
    options.add_argument(
        "--tokenizer", default="byte", help="byte, or bpe for the corpus's own vocabulary"
    )
    options.add_argument("--latency-ms", type=float, default=50.0, help="before each answer")
    options.add_argument(
        "--bandwidth-mb", type=float, default=125.0, help="MB/s of all connections together"
    )
    options.add_argument("--documents", type=int, default=DOCUMENTS, help="in a row group")
    options.add_argument(
        "--fetches", type=int, default=8, help="requests in flight, of loader and downloader"
    )
    options.add_argument("--seed", type=int, default=1, help="of the faults")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (1 if args.quick else 3)
    args.mb = args.mb or (20 if args.quick else 400)
    settings = {
        "corpus": load_corpus(args.quick).name, "mb": args.mb, "tokenizer": args.tokenizer,
        "latency_ms": args.latency_ms, "bandwidth_mb": args.bandwidth_mb, "documents": args.documents,
        "fetches": args.fetches, "batch": [BATCH_SIZE, SEQ_LEN], "seed": args.seed, "repeats": repeats,
    }  # fmt: skip
    report = Report("remote_throughput", args.quick, settings)
    for compression in args.compression:
        Bench(report, args, repeats, compression).run()
    report.close()


if __name__ == "__main__":
    main()
