"""Measure what grows with files, documents and ranks, and the requests of a cluster's start.

Sizes:  ranks of large runs, one at a time, each in its own process: up to 100,000 files, 10^9
        documents according to their footers, 4,096 ranks. One size varies at a time. Nothing is
        simulated: a loopback Hub lists and serves the files, a loader reads them. Every repeat has
        another seed; the listing is on disk, the footers are not. Resumes continue after 50
        batches.
Hosts:  hosts of 8 ranks of a run of 1,000, one host at a time, each with its own cache, until no
        rank sends more requests. The requests of 125 hosts are 125 times those of one. Times of
        hosts mean little: eight ranks and the Hub share this machine's cores.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import common
from common import BATCH_SIZE, HUB_URL, SEQ_LEN, Answer
from corpora import Corpus, load_corpus, write_parquet
from report import Report, print_markdown, show

GROUP_ROWS = 1000
"""Documents per row group, if a file has as many."""
ROW_BYTES = 64
RESUME_AFTER = 50
HOSTS, PER_HOST = 125, 8
WORLD = HOSTS * PER_HOST
HOST_FILES = 10_000
HOST_DOCUMENTS = 500
STILL_S = 2.0
"""A rank that sends no request for this long has finished starting."""
DEADLINE_S = 600.0


class Point(NamedTuple):
    """The size of a run: files, documents per file, ranks."""

    files: int
    rows: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.files:,} files, {self.files * self.rows:,} documents, {self.ranks:,} ranks"


AXES = {
    "files": [Point(n, 10_000, 64) for n in (1_000, 10_000, 100_000)],
    "documents": [Point(100_000, n, 4096) for n in (10, 100, 1_000, 10_000)],
    "ranks": [Point(100_000, 10_000, n) for n in (1, 64, 4096)],
    "ranks, fewer than 8 files for each": [Point(2_400, 10_000, n) for n in (64, 1024, 4096)],
}
QUICK = {
    "files": [Point(n, 100, 8) for n in (100, 1_000)],
    "ranks, fewer than 8 files for each": [Point(100, 100, n) for n in (8, 64)],
}
COLUMNS = {
    "cold_s": ("list, cold", "s"),
    "list_s": ("list, kept", "s"),
    "first_s": ("first batch", "s"),
    "asked": ("requests until then", ""),
    "resume_s": ("resume", "s"),
    "state": ("state of a rank", "bytes"),
    "peak": ("peak memory", "MB"),
}


# One rank, in its own process


def rank(case: Mapping[str, Any]) -> Answer:
    """List, take the first batch, resume."""
    from penstock import AsyncDataLoader, Shard, TextDataset

    told: Answer = {}
    begun = time.perf_counter()
    data = TextDataset(case["url"], tokenizer="byte", seq_len=ROW_BYTES)
    told["list_s"] = time.perf_counter() - begun

    def loader() -> Any:
        shard = Shard(case["ranks"], case["rank"])
        options: Answer = {"shard": shard, "lanes": case["ranks"], "seed": case["seed"]}
        return AsyncDataLoader(data, 1, True, n_workers=1, prefetch_size=1, **options)

    told["window"] = [time.monotonic()]
    begun = time.perf_counter()
    with loader() as fresh:
        next(fresh)
        told["first_s"] = time.perf_counter() - begun
        told["window"].append(time.monotonic())
        for _ in range(RESUME_AFTER):
            next(fresh)
        state = fresh.state_dict()
    begun = time.perf_counter()
    resumed = loader()
    resumed.load_state_dict(state)
    next(resumed)
    told["resume_s"] = time.perf_counter() - begun
    resumed.shutdown()
    told["state"] = len(json.dumps(state))
    return told | {"peak": common.process_memory()["peak"] / 1e6}


def list_only(case: Mapping[str, Any]) -> Answer:
    """List with an empty cache."""
    from penstock import TextDataset

    listing = common.timed(lambda: TextDataset(case["url"], tokenizer="byte", seq_len=ROW_BYTES))
    return {"cold_s": listing}


def host_rank(case: Mapping[str, Any]) -> Answer:
    """Start as a rank of a host, and wait until it sends no more requests."""
    from penstock import AsyncDataLoader, Shard, TextDataset

    begun = time.perf_counter()
    data = TextDataset(case["url"], tokenizer=case["tokenizer"], seq_len=SEQ_LEN)
    shard = Shard(WORLD, case["rank"])
    with AsyncDataLoader(
        data, BATCH_SIZE, True, seed=7, n_workers=1, shard=shard, lanes=WORLD
    ) as loader:
        next(loader)
        first_s = time.perf_counter() - begun
        before, since = -1, time.monotonic()
        while time.monotonic() - since < case["still_s"]:
            if (now := loader.stats().requests) != before:
                before, since = now, time.monotonic()
            time.sleep(0.05)
    return {"first_s": first_s, "peak": common.process_memory()["peak"] / 1e6}


def run(kind: str, cases: Sequence[Mapping[str, Any]], endpoint: str) -> list[Answer]:
    """Run children in parallel. Return their reports, and when they ran."""
    begun = time.monotonic()
    processes = []
    for case in cases:
        command = [sys.executable, __file__, "--contender", json.dumps({"kind": kind, **case})]
        environment = common.clean_environment(
            HF_ENDPOINT=endpoint, PENSTOCK_CACHE=case["cache"], HF_HOME=case["cache"]
        )
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        processes.append(child)
    told = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a {kind} of {cases[0]} failed; see above")
    return [{**json.loads(text), "ran": (begun, time.monotonic())} for text in told]


# Sizes


def small_file(rows: int) -> Path:
    """Return a folder with a Parquet file of short documents."""
    folder = common.bench_folder(f"scale/rows-{rows}")
    path = folder / "text.parquet"
    if not path.exists():
        texts = [sha256(b"%d" % i).hexdigest()[:ROW_BYTES] for i in range(rows)]
        write_parquet(folder.parent / "made", {"text": texts}, GROUP_ROWS, "none")
        (folder.parent / "made").rename(path)
    return folder


def measure_sizes(
    axes: Mapping[str, Sequence[Point]], repeats: int
) -> dict[Point, dict[str, list[float]]]:
    """Measure each point once per repeat. Points with the same files share a Hub and listing."""
    points = list(dict.fromkeys(point for axis in axes.values() for point in axis))
    found: dict[Point, dict[str, list[float]]] = {point: {} for point in points}
    for files, rows in dict.fromkeys(point[:2] for point in points):
        here = [point for point in points if point[:2] == (files, rows)]
        windows: list[tuple[Point, list[float]]] = []
        with tempfile.TemporaryDirectory() as cache, common.Hub(small_file(rows), files) as hub:
            branch, pinned = f"{HUB_URL}/data", f"{HUB_URL}@{hub.commit()}/data"
            cold = run("list_only", [{"url": branch, "cache": cache}], hub.endpoint)[0]["cold_s"]
            for repeat in range(repeats):
                for point in here:
                    for kind in ("footers", "tokens"):  # of an earlier rank; the listing stays
                        shutil.rmtree(Path(cache) / kind, ignore_errors=True)
                    who = {"seed": repeat, "rank": point.ranks // 3, "ranks": point.ranks}
                    case = {"url": pinned, "cache": cache, **who}
                    told = run("rank", [case], hub.endpoint)[0]
                    windows.append((point, told["window"]))
                    for name in COLUMNS.keys() & told.keys():
                        found[point].setdefault(name, []).append(told[name])
        for point, window in windows:
            found[point]["cold_s"] = [cold]
            found[point].setdefault("asked", []).append(len(hub.between(*window)))
    return found


def report_sizes(
    report: Report, axes: Mapping[str, Sequence[Point]], found: Mapping[Point, Any]
) -> None:
    """Report every number once, and its growth along each axis."""
    for point, values in found.items():
        for name, (label, unit) in COLUMNS.items():
            report.add(str(point), label, values[name], unit)
    for axis, points in axes.items():
        head = [axis, *(f"{p.files:,} × {p.rows:,}, {p.ranks:,}" for p in points)]
        rows = []
        for name, (label, unit) in COLUMNS.items():
            medians = [statistics.median(found[point][name]) for point in points]
            for (before, after), point in zip(pairwise(medians), points[1:], strict=True):
                if before:
                    report.add(f"growth with {axis}, to {point}", label, after / before, "x")
            rows.append([f"{label}, {unit}" if unit else label, *map(show, medians)])
        print_markdown(head, rows)


# Hosts


def measure_hosts(report: Report, corpus: Corpus, per_host: int, quick: bool) -> None:
    """Start hosts in turn, and count the requests of each in the Hub's log."""
    tokenizer, still_s = ("byte", 0.5) if quick else (str(corpus.tokenizer), STILL_S)
    starts: dict[str, list[Answer]] = {}
    folder = corpus.hosted("zstd", HOST_DOCUMENTS)
    with tempfile.TemporaryDirectory() as place, common.Hub(folder, HOST_FILES) as hub:
        branch, pinned = f"{HUB_URL}/data", f"{HUB_URL}@{hub.commit()}/data"

        def host(number: int, url: str, cache: str) -> list[Answer]:
            base = {"url": url, "tokenizer": tokenizer, "still_s": still_s}
            base |= {"cache": f"{place}/{cache}"}
            ranks = range(number * PER_HOST, number * PER_HOST + per_host)
            return run("host_rank", [base | {"rank": rank} for rank in ranks], hub.endpoint)

        starts["cold, a branch name"] = host(0, branch, "host-0")
        starts["again, a branch name"] = host(0, branch, "host-0")
        starts["again, the commit"] = host(0, pinned, "host-0")
        shutil.copytree(f"{place}/host-0/listings", f"{place}/copied/listings")
        starts["a listing copied to it, the commit"] = host(1, pinned, "copied")
    rows = []
    for name, told in starts.items():
        counts = requests_by_kind(hub.between(*told[0]["ran"]))
        for what, value in counts.items():
            report.add(f"host, {name}", what, value, "", ranks=per_host)
        report.add(f"host, {name}", "last first batch", max(t["first_s"] for t in told), "s")
        report.add(f"host, {name}", "peak memory of a rank", max(t["peak"] for t in told), "MB")
        cluster = [HOSTS * counts[what] for what in ("api", "resolve", "cdn MB")]
        rows.append([name, *map(show, [*counts.values(), *cluster])])
    totals = [f"{HOSTS} hosts: api", "resolve", "cdn MB"]
    print_markdown(["start of a host", *counts, *totals], rows)


def requests_by_kind(requests: Iterable[Answer]) -> dict[str, float]:
    """Count requests and megabytes, by the Hub's three kinds of addresses."""
    found = dict.fromkeys(("api", "resolve", "cdn", "api MB", "cdn MB"), 0.0)
    for request in requests:
        kind = "api" if request["path"].startswith("/api/") else "resolve"
        kind = "cdn" if request["port"] == "cdn" else kind
        found[kind] += 1
        found["api MB" if kind == "api" else "cdn MB"] += request["sent"] / 1e6
    return found


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--only", choices=("sizes", "hosts"), help="one half of it")
    args = options.parse_args()
    if args.contender:
        common.silence_warnings()
        common.hide_torch()
        kinds = {"rank": rank, "list_only": list_only, "host_rank": host_rank}
        print(json.dumps(kinds[args.contender["kind"]](args.contender)))
        return
    repeats = args.repeats or (1 if args.quick else 3)
    corpus = load_corpus(args.quick)
    report = Report("scale", args.quick, {"repeats": repeats, "corpus": corpus.name})
    if args.only != "hosts":
        axes = QUICK if args.quick else AXES
        report_sizes(report, axes, measure_sizes(axes, repeats))
    if args.only != "sizes":
        measure_hosts(report, corpus, 2 if args.quick else PER_HOST, args.quick)
    report.close()


if __name__ == "__main__":
    main()
