"""What grows with files, documents and ranks, and what does a cluster's first minute ask of the Hub?

Ranks of large runs, one at a time, each in a process of its own: up to 100,000 files, 10^9 documents by
their footers, 4,096 ranks. One size is varied at a time, and the ratio to the size before is given. All
parts are real: a loopback Hub lists and serves the files, a loader reads them. Every repeat has another
seed, and finds the listing on disk, but no footers. Nobody reads the first 80 % of an epoch: the state
there is written down.

Hosts of 8 ranks of a run of 1,000, one host after the other, each with a cache of its own: what the Hub
is asked for until nothing more is. The text is the corpus, the vocabulary GPT-2's. What 125 hosts ask for
is that number times 125. Times of hosts mean little: eight ranks and the Hub share this machine's cores.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from hosted import Hub
from record import Goal, Report, show
from scale_ranks import (
    DEADLINE_S,
    GROUP_ROWS,
    HOSTS,
    OWN_LANES,
    PER_HOST,
    ROW_BYTES,
    WORLD,
    host_rank,
    list_only,
    rank,
)

from common import MB, REPOSITORY, bench_folder, parser
from corpora import Corpus, load_corpus

HOST_FILES = 10_000
HOST_DOCUMENTS = 500
"""Documents of a row group of the corpus: some megabytes of text."""
STAGED_BYTES = 200 * MB
"""Tokens of more chunks than a rank reads ahead."""
SHARED = "two ranks as two hosts, share_listing"
STILL_S = 2.0
"""A rank that has asked for nothing for so long has all it wants; and how long that may take."""


class Point(NamedTuple):
    """The size of a run."""

    files: int
    rows: int
    """Documents of a file."""
    ranks: int

    def __str__(self) -> str:
        return f"{self.files:,} files, {self.files * self.rows:,} documents, {self.ranks:,} ranks"


AXES = {
    "files": [Point(n, 10_000, 64) for n in (1_000, 10_000, 100_000)],
    "documents": [Point(100_000, n, 4096) for n in (10, 100, 1_000, 10_000)],
    "ranks": [Point(100_000, 10_000, n) for n in (1, 64, 4096)],
    "ranks, fewer than 8 files for each": [Point(2_400, 10_000, n) for n in (64, 1024, 4096)],
    "documents, fewer than 8 files for each rank": [
        Point(2_400, n, 1024) for n in (10_000, 100_000)
    ],
}
QUICK = {
    "files": [Point(n, 100, 8) for n in (100, 1_000)],
    "ranks": [Point(1_000, 100, n) for n in (8, 64)],
    "ranks, fewer than 8 files for each": [Point(100, 100, n) for n in (8, 64)],
}
COLUMNS = {
    "cold_s": ("list, cold", "s"),
    "list_s": ("list, kept", "s"),
    "held": ("held by the list", "MB"),
    "plan_ms": ("plan", "ms"),
    "lanes_ms": (f"plan of {OWN_LANES} lanes", "ms"),
    "first_s": ("first batch", "s"),
    "asked": ("requests until then", ""),
    "refs": ("held by the loader", "MB"),
    "resume_s": ("resume at 80 %", "s"),
    "state": ("state of a rank", "bytes"),
    "states": ("states of all ranks", "bytes"),
    "load_s": ("load all states", "s"),
    "peak": ("peak memory", "MB"),
}
"""What is measured of a rank, as tables call it."""
FLAT = {"list_s", "held", "plan_ms", "first_s", "resume_s", "state", "peak"}
"""What must not grow with documents or ranks."""


# Around them


def run(kind: str, cases: Sequence[Mapping[str, Any]], endpoint: str) -> list[dict[str, Any]]:
    """Children side by side: what each of them told, and when they ran."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "PENSTOCK_"))
    }
    begun = time.monotonic()
    processes = []
    for case in cases:
        command = [sys.executable, __file__, "--contender", json.dumps({"kind": kind, **case})]
        own = environment | {
            "HF_ENDPOINT": endpoint,
            "PENSTOCK_CACHE": case["cache"],
            "HF_HOME": case["cache"],
        }
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own))
    told = [process.communicate(timeout=10 * DEADLINE_S)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a {kind} of {cases[0]} failed; see its error above")
    return [{**json.loads(text), "ran": (begun, time.monotonic())} for text in told]


def small_file(rows: int) -> Path:
    """A folder with a Parquet file of so many short documents."""
    folder = bench_folder("scale") / f"rows-{rows}"
    if not folder.exists():
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = [sha256(b"%d" % i).hexdigest()[:ROW_BYTES] for i in range(rows)]
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        pq.write_table(
            pa.table({"text": texts}),
            made / "text.parquet",
            row_group_size=GROUP_ROWS,
            compression="none",
        )
        made.rename(folder)
    return folder


def asked(requests: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Requests and megabytes, by the Hub's three kinds of addresses."""
    found = dict.fromkeys(("api", "resolve", "cdn", "api MB", "cdn MB"), 0.0)
    for request in requests:
        kind = (
            "cdn"
            if request["port"] == "cdn"
            else "api"
            if request["path"].startswith("/api/")
            else "resolve"
        )
        found[kind] += 1
        found["api MB" if kind == "api" else "cdn MB"] += request["sent"] / 1e6
    return found


# Sizes


def measure_sizes(
    axes: Mapping[str, Sequence[Point]], repeats: int
) -> dict[Point, dict[str, list[float]]]:
    """Each point once a repeat; points with the same files share a Hub and its kept listing."""
    points = list(dict.fromkeys(point for axis in axes.values() for point in axis))
    found: dict[Point, dict[str, list[float]]] = {point: {} for point in points}
    for files, rows in dict.fromkeys(point[:2] for point in points):
        here = [point for point in points if point[:2] == (files, rows)]
        windows: list[tuple[Point, list[float], bool]] = []
        with tempfile.TemporaryDirectory() as cache, Hub(small_file(rows), files) as hub:
            commit, branch = hub.commit(), f"hf://datasets/{REPOSITORY}/data"
            cold = run("list_only", [{"url": branch, "cache": cache}], hub.endpoint)[0]
            pinned = f"hf://datasets/{REPOSITORY}@{commit}/data"
            for repeat in range(repeats + 1):
                for point in here:
                    case = {**point._asdict(), "url": pinned, "seed": repeat, "rank": point.ranks // 3,
                            "traced": repeat == repeats, "cache": cache}  # fmt: skip
                    for kind in ("footers", "tokens"):  # of a rank before it; the listing stays
                        shutil.rmtree(Path(cache) / kind, ignore_errors=True)
                    told = run("rank", [case], hub.endpoint)[0]
                    windows.append((point, told.pop("window"), repeat == repeats))
                    # Tracing takes time and memory of its own, so the last repeat tells nothing else.
                    names = (
                        {"held", "refs"} if repeat == repeats else set(COLUMNS) - {"held", "refs"}
                    )
                    for name in names & told.keys():
                        if told[name] is not None:
                            found[point].setdefault(name, []).append(told[name])
        listed = asked(hub.between(*cold["ran"]))
        for point, window, traced in windows:
            if not traced:
                found[point].setdefault("asked", []).append(float(len(hub.between(*window))))
        for point in here:
            found[point] |= {"cold_s": [cold["cold_s"]], "list requests": [listed["api"]], "list MB": [listed["api MB"]],
                             "packed MB": [cold["packed"] / 1e6], "pack_s": [cold["pack_s"] + cold["unpack_s"]]}  # fmt: skip
    return found


def report_sizes(
    report: Report, axes: Mapping[str, Sequence[Point]], found: Mapping[Point, Any]
) -> None:
    """Every number once, and along each axis the ratios."""
    more = {"list requests": "", "list MB": "MB", "packed MB": "MB", "pack_s": "s"}
    for point, values in found.items():
        for name, (label, unit) in (
            COLUMNS | {name: (name, unit) for name, unit in more.items()}
        ).items():
            if name in values:
                report.add(str(point), label, values[name], unit)
    for axis, points in axes.items():
        for name, (label, _) in COLUMNS.items():
            medians = [statistics.median(found[p][name]) for p in points if name in found[p]]
            for before, after, point in zip(medians, medians[1:], points[1:], strict=False):
                goal = Goal("<=", 1.5) if name in FLAT and axis in ("documents", "ranks") else None
                if len(medians) == len(points) and before:
                    report.add(f"growth with {axis}, to {point}", label, after / before, "x", goal)


# Hosts


class Host(NamedTuple):
    """How hosts begin, and what the Hub is asked for."""

    name: str
    ranks: int
    asked: list[dict[str, float]]
    shared: bool = False
    """Whether one rank of the whole run lists for all."""

    def totals(self) -> list[float]:
        """Of all hosts: requests for listings, for addresses, and gigabytes of data."""
        one = {
            name: statistics.median(counts[name] for counts in self.asked)
            for name in ("api", "resolve", "cdn MB")
        }
        share = WORLD / self.ranks
        return [
            one["api"] * (1 if self.shared else HOSTS),
            share * one["resolve"],
            share * one["cdn MB"] / 1e3,
        ]


def measure_hosts(corpus: Corpus, files: int, per_host: int, quick: bool) -> list[Host]:
    """Hosts that begin in turn, and what the Hub's log says of each."""
    folder = corpus.hosted("zstd", HOST_DOCUMENTS)
    tokenizer, still_s = ("byte", 0.5) if quick else (str(corpus.tokenizer), STILL_S)
    begun: list[tuple[str, int, list[list[dict[str, Any]]]]] = []
    with tempfile.TemporaryDirectory() as place, Hub(folder, files) as hub:
        branch = f"hf://datasets/{REPOSITORY}/data"
        pinned = f"hf://datasets/{REPOSITORY}@{hub.commit()}/data"

        def host(number: int, url: str, *caches: str, **more: Any) -> list[dict[str, Any]]:
            own = [f"{place}/{cache}" for cache in caches] * (
                per_host // len(caches) if not more else 1
            )
            cases = [{"url": url, "tokenizer": tokenizer, "rank": number * PER_HOST + i, "cache": cache,
                      "still_s": still_s, **more} for i, cache in enumerate(own)]  # fmt: skip
            return run("host_rank", cases, hub.endpoint)

        begun.append(
            (
                "cold, a branch name",
                per_host,
                [host(i, branch, f"host-{i}") for i in range(1 if quick else 2)],
            )
        )
        begun.append(("again, a branch name", per_host, [host(0, branch, "host-0")]))
        begun.append(("again, the commit", per_host, [host(0, pinned, "host-0")]))
        shutil.copytree(f"{place}/host-0/listings", f"{place}/copied/listings")
        begun.append(("a listing copied to it, the commit", per_host, [host(1, pinned, "copied")]))
        if importlib.util.find_spec("torch"):
            shared = host(0, branch, "shared-0", "shared-1", meet=f"{place}/meet", world=2)
            begun.append((SHARED, 2, [shared]))
        begun.append(
            ("staging of one rank, the commit", 1, [host(0, pinned, "staged", stage=STAGED_BYTES)])
        )
        begun.append(("one rank, staged, the commit", 1, [host(0, pinned, "staged", alone=True)]))
    done = []
    for name, ranks, runs in begun:
        asked_for = [
            asked(hub.between(*told[0]["ran"])) | {
                "first batch of the last rank": max(one["first_s"] for one in told),
                "peak memory of a rank": max(one["peak"] for one in told),
                **told[0].get("staged", {}),
            }
            for told in runs
        ]  # fmt: skip
        done.append(Host(f"{name}, {files:,} files", ranks, asked_for, name == SHARED))
    return done


def report_hosts(report: Report, hosts: Sequence[Host]) -> None:
    units = {
        "chunks": "",
        "M tokens": "",
        "api MB": "MB",
        "cdn MB": "MB",
        "first batch of the last rank": "s",
        "peak memory of a rank": "MB",
    }
    for host in hosts:
        for what in host.asked[0]:
            values = [counts[what] for counts in host.asked]
            report.add(
                f"first minute, {host.name}",
                what,
                values,
                units.get(what, "requests"),
                ranks=host.ranks,
            )
        for what, value in zip(("api", "resolve", "cdn GB"), host.totals(), strict=True):
            report.add(f"first minute, {host.name}", f"all {HOSTS} hosts: {what}", value, "")


# For docs/scale.md


def page(
    axes: Mapping[str, Sequence[Point]], sizes: Mapping[Point, Any], hosts: Sequence[Host]
) -> None:
    """The tables of the page, to be copied there."""
    for axis, points in axes.items():
        rows = []
        for name, (label, unit) in COLUMNS.items():
            if all(name in sizes[point] for point in points):
                cells = [show(statistics.median(sizes[point][name])) for point in points]
                rows.append([f"{label}, {unit}" if unit else label, *cells])
        markdown([axis, *(f"{p.files:,} × {p.rows:,}, {p.ranks:,}" for p in points)], rows)
    names = ("list requests", "list MB", "packed MB", "pack_s")
    listed = [
        [f"{p.files:,}", *(show(sizes[p][name][0]) for name in names)]
        for p in axes.get("files", ())
    ]
    markdown(
        ["files", "requests", "MB", "packed for other ranks, MB", "to pack and unpack, s"], listed
    )
    counted = ("api", "api MB", "resolve", "cdn", "cdn MB")
    lines = []
    for host in hosts:
        one = [statistics.median(counts[name] for counts in host.asked) for name in counted]
        lines.append([host.name, *map(show, [host.ranks, *one, *host.totals()])])
    markdown(
        ["how it begins", "ranks", *counted, f"{HOSTS} hosts: api", "resolve", "cdn GB"], lines
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of a page; nothing where there are no rows."""
    if rows:
        lines = [head, ["---"] * len(head), *rows]
        print("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=("sizes", "hosts"), help="one half of it")
    args = options.parse_args()
    if args.contender:
        kinds = {"rank": rank, "list_only": list_only, "host_rank": host_rank}
        print(json.dumps(kinds[args.contender["kind"]](args.contender)))
        return
    axes = {} if args.only == "hosts" else QUICK if args.quick else AXES
    repeats = args.repeats or (1 if args.quick else 3)
    per_host = 2 if args.quick else PER_HOST
    corpus = load_corpus(args.quick)
    report = Report(
        "scale",
        args.quick,
        {"repeats": repeats, "corpus": corpus.name, "ranks of a host": per_host},
    )
    sizes = measure_sizes(axes, repeats)
    report_sizes(report, axes, sizes)
    hosts = [] if args.only == "sizes" else measure_hosts(corpus, HOST_FILES, per_host, args.quick)
    report_hosts(report, hosts)
    report.close()
    page(axes, sizes, hosts)


if __name__ == "__main__":
    main()
