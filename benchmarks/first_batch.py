"""Measure the time from the start of the process to the first batch.

Runs fresh processes, imports included. The clock starts just before the process is created, and the
child reads the same monotonic clock. Byte code is compiled and files are in the page cache.

Alone:   the interpreter, `import penstock`, `import torch`, for comparison.
Disk:    the first batch from a local file with the corpus's vocabulary; the same with torch, which
         takes longer to import than everything else, and with torch imported while a started loader
         runs; the same with bytes for tokens.
Hub:     a loopback Hub, 2,400 files, 50 ms before each response, 100 MB/s. Cold: nothing on disk.
         Warm: listing and footers on disk. Cached: tokens on disk too, pinned to a commit, where
         any request is an error. For comparison `datasets`, streamed, with `tokenizers`, in typical
         code and at its best: without torch, with a commit, a pattern and a column. The ids of its
         first batch in order must be those of Penstock.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, HUB_URL, MB, SEQ_LEN
from corpora import load_corpus
from report import Report, show

DOCUMENTS = 250
"""Documents per row group: 1.5 MB of text."""
CACHED_CHUNKS = 40
"""More than a loader reads ahead of its first batch."""
DEADLINE_S = 120.0

FRAME = """
import sys, time
marks = [("interpreter", time.monotonic())]
def mark(name):
    marks.append((name, time.monotonic()))
crc = 0
{body}
import json
print(json.dumps({{"marks": marks, "crc": crc}}), flush=True)
"""
NO_TORCH = "sys.modules['torch'] = None\n"
PENSTOCK = """
from penstock import AsyncDataLoader, TextDataset
mark("names imported")
data = TextDataset({url!r}, tokenizer={tokenizer!r}, seq_len={seq_len}, cache={cache!r})
mark("dataset opened")
with AsyncDataLoader(data, {batch_size}, shuffle={shuffle!r}) as loader:
    mark("loader started")
    {between}
    batch = next(loader)
    mark("first batch")
    {after}
import zlib, numpy
crc = zlib.crc32(numpy.asarray(batch.inputs).astype("int64").tobytes())
"""
FILL = f"while loader.stats().cache_written < {CACHED_CHUNKS}: next(loader)"
DATASETS = """
import numpy, zlib
from datasets import load_dataset
from tokenizers import Tokenizer
mark("names imported")
tokenizer = Tokenizer.from_file({tokenizer!r})
end = tokenizer.token_to_id("<|endoftext|>")
stream = load_dataset({repository!r}, split="train", streaming=True, **{options!r})
mark("dataset opened")
ids = []
for row in stream:
    ids += tokenizer.encode(row["text"]).ids + [end]
    if len(ids) > {tokens}:
        break
inputs = numpy.array(ids[:{tokens}], numpy.int64)
mark("first batch")
print(json.dumps({{"marks": marks, "crc": zlib.crc32(inputs.tobytes())}}), flush=True)
os._exit(0)  # some of its processes never end otherwise
"""


@dataclass
class Start:
    """One run, with times in seconds since the process was created."""

    begun: float
    ended: float
    marks: dict[str, float]
    crc: int

    @property
    def last(self) -> float:
        """The time of the first batch, if there is one."""
        return list(self.marks.values())[-1]


@dataclass
class Case:
    """One kind of start. `kept`: the cache of an earlier run; None for an empty one each time."""

    code: str
    kept: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    runs: list[Start] = field(default_factory=list)


def start(case: Case, endpoint: str) -> Start:
    """Run one child in an empty folder, so that it cannot import local files."""
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as fresh:
        kept = str(case.kept or fresh)
        environment = common.clean_environment(
            HF_ENDPOINT=endpoint, PENSTOCK_CACHE=kept, HF_HOME=kept
        )
        command = [sys.executable, "-c", FRAME.format(body=case.code)]
        begun = time.monotonic()
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=DEADLINE_S,
            cwd=empty,
            env=environment | dict(case.env),
        )
        ended = time.monotonic()
    told = json.loads(done.stdout)
    return Start(begun, ended, {name: at - begun for name, at in told["marks"]}, told["crc"])


def penstock_code(url: str, tokenizer: str, torch: bool = False, **more: Any) -> str:
    given = {"cache": "auto", "shuffle": True, "between": "pass", "after": "pass"} | more
    code = PENSTOCK.format(
        url=url, tokenizer=tokenizer, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, **given
    )
    return code if torch else NO_TORCH + code


def local_cases(source: str, tokenizer: str) -> dict[str, Case]:
    torch = "import torch; mark('torch imported')"
    return {
        "interpreter": Case(""),
        "import penstock": Case("import penstock; mark('penstock imported')"),
        "import torch": Case(torch),
        "disk": Case(penstock_code(source, tokenizer)),
        "disk, bytes": Case(penstock_code(source, "byte")),
        "disk, torch": Case(penstock_code(source, tokenizer, torch=True)),
        "disk, torch imported meanwhile": Case(
            penstock_code(source, tokenizer, torch=True, between=torch)
        ),
    }


def hub_cases(folder: Path, tokenizer: str, commit: str) -> dict[str, Case]:
    pinned = f"{HUB_URL}@{commit}"

    def datasets(**options: Any) -> str:
        return "import json, os\n" + DATASETS.format(
            tokenizer=tokenizer,
            repository=common.REPOSITORY,
            options=options,
            tokens=BATCH_SIZE * SEQ_LEN,
        )

    best = datasets(data_files="data/*.parquet", revision=commit, columns=["text"])
    no_torch = {"USE_TORCH": "0"}
    return {
        "Hub, cold": Case(penstock_code(HUB_URL, tokenizer)),
        "Hub, warm": Case(penstock_code(HUB_URL, tokenizer, cache=False), folder / "warm"),
        "Hub, cached": Case(penstock_code(pinned, tokenizer), folder / "cached"),
        "datasets, cold": Case(datasets()),
        "datasets, warm": Case(datasets(), folder / "datasets"),
        "datasets at its best, cold": Case(best, env=no_torch),
        "datasets at its best, warm": Case(best, folder / "best", no_torch),
    }


def report_requests(report: Report, cases: Mapping[str, Case], hub: common.Hub) -> None:
    for name, case in cases.items():
        if name.startswith(("Hub", "datasets")):
            asked = [hub.between(run.begun, run.begun + run.last) for run in case.runs]
            report.add(name, "requests before it", [len(requests) for requests in asked], "")
            sent = [sum(request["sent"] for request in requests) / MB for requests in asked]
            report.add(name, "received before it", sent, "MB")
    for run in cases["Hub, cached"].runs:
        if found := hub.between(run.begun, run.ended):
            raise RuntimeError(f"{len(found)} requests with all tokens cached: {found[0]['path']}")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--files", type=int, help="in the dataset (2400)")
    options.add_argument("--latency-ms", type=float, default=50.0, help="before each answer")
    options.add_argument("--bandwidth-mb", type=float, default=100.0, help="MB/s in all")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 7)
    files = args.files or (50 if args.quick else 2400)
    corpus = load_corpus(args.quick)
    tokenizer = str(corpus.tokenizer)
    network = {"latency_ms": args.latency_ms, "bandwidth_mb": args.bandwidth_mb}
    settings = {"corpus": corpus.name, "files": files, "repeats": repeats} | network
    report = Report("first_batch", args.quick, settings)
    hosted = corpus.hosted("zstd", DOCUMENTS)
    flags = ["--latency-ms", str(args.latency_ms), "--bandwidth-mb", str(args.bandwidth_mb)]
    with tempfile.TemporaryDirectory() as name, common.Hub(hosted, files, *flags) as hub:
        cases = local_cases(str(hosted / common.HOSTED), tokenizer)
        cases |= hub_cases(Path(name), tokenizer, hub.commit())
        for case in cases.values():  # compiles byte code, and fills the caches that are kept
            start(case, hub.endpoint)
        fill = penstock_code(f"{HUB_URL}@{hub.commit()}", tokenizer, after=FILL)
        start(Case(fill, cases["Hub, cached"].kept), hub.endpoint)
        in_order = Case(penstock_code(str(hosted / common.HOSTED), tokenizer, shuffle=False))
        crc = start(in_order, hub.endpoint).crc

        def starting(case: Case) -> Callable[[], float]:
            def measure() -> float:
                case.runs.append(start(case, hub.endpoint))
                return case.runs[-1].last

            return measure

        seconds = common.interleave(repeats, {name: starting(case) for name, case in cases.items()})
    for name, values in seconds.items():
        if name.startswith("datasets") and any(run.crc != crc for run in cases[name].runs):
            raise RuntimeError(f"{name}: its first batch has other ids than Penstock's in order")
        alone = name.startswith(("interpreter", "import"))
        report.add(name, "done after" if alone else "first batch after", values, "s")
    for name, peer in (("Hub, cold", "cold"), ("Hub, warm", "warm"), ("Hub, cached", "warm")):
        for rival in (f"datasets, {peer}", f"datasets at its best, {peer}"):
            report.add(name, f"/ {rival}", common.ratios(seconds[name], seconds[rival]), "x")
    report_requests(report, cases, hub)
    report.close()
    for name in ("disk", "Hub, cold", "Hub, cached"):
        middle = [
            f"{part} {show(statistics.median(run.marks[part] for run in cases[name].runs))}"
            for part in cases[name].runs[0].marks
        ]
        print(f"# {name}, s since the process was created: {', '.join(middle)}")


if __name__ == "__main__":
    main()
