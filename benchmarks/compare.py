"""Measure this revision, alone or against another one. Each run is a fresh process on the same
data.

With --against, both revisions run alternately. The other one is extracted from git into a temporary
folder and runs with the same interpreter, with its src/ first on PYTHONPATH. The workers use only
the API that both revisions have. Ratios are new over old, round by round. A wait that releases the
GIL simulates the accelerator's step.

First batches, also those of a resume, are measured from just before `import penstock`, as if torch
was not installed. The loopback Hub of this revision serves both. Rows without an old value are
measured only on the new revision.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, HUB_URL, SEQ_LEN, TOKENS, Answer
from corpora import Corpus, load_corpus, token_file
from report import Goal, git, machine, show, table

STEP_S = 0.02
WORKERS = 2
DEADLINE_S = 600.0
HUB_NETWORK = ("--latency-ms", "50", "--bandwidth-mb", "100")


@dataclass(frozen=True)
class Sizes:
    """The amounts of data that a worker reads."""

    warm_batches: int = 1500
    seconds: float = 3.0
    steps: int = 200
    file_batches: int = 6104


QUICK = Sizes(warm_batches=10, seconds=0.02, steps=10, file_batches=60)


# Workers: each runs in a fresh process, and reports numbers by metric


def loader_of(dataset: Any, shuffle: bool) -> Any:
    """Return a loader with arguments that both revisions support."""
    from penstock import AsyncDataLoader

    return AsyncDataLoader(dataset, BATCH_SIZE, shuffle=shuffle, seed=1, n_workers=WORKERS)


def text_of(case: Answer) -> Any:
    from penstock import TextDataset

    return TextDataset(case["source"], tokenizer=case["tokenizer"], seq_len=SEQ_LEN)


def tokens_per_s(batches: Iterator[Any], sizes: Sizes) -> float:
    """Return millions of tokens per second after a warmup."""
    for _ in itertools.islice(batches, sizes.warm_batches):
        pass
    begun, took, n = time.perf_counter(), 0.0, 0
    while took < sizes.seconds:
        n += sum(1 for _ in itertools.islice(batches, 100))
        took = time.perf_counter() - begun
    return n * TOKENS / took / 1e6


def run_text(case: Answer, sizes: Sizes) -> Answer:
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    with loader_of(text_of(case), case["shuffle"]) as loader:
        rate = tokens_per_s(loader, sizes)
    order = case["order"]
    return {f"text, {order}": rate, f"peak RSS, {order}": common.process_memory()["peak"] / 1e6}


def run_limit(case: Answer, sizes: Sizes) -> Answer:
    from limit import DecodeAndTokenize

    files = sorted(Path(case["source"]).iterdir())
    limit = DecodeAndTokenize(files, case["tokenizer"], WORKERS)
    sum(limit.counts())
    begun = time.perf_counter()
    ids = sum(limit.counts())
    seconds = time.perf_counter() - begun
    limit.close()
    return {"decode + tokenize alone": ids / seconds / 1e6}


def run_token_file(case: Answer, sizes: Sizes) -> Answer:
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    from penstock import TokenFileDataset

    dataset = TokenFileDataset.from_binary_file(token_file(sizes.file_batches), SEQ_LEN)
    with loader_of(dataset, shuffle=True) as loader:
        return {"token file": tokens_per_s(loader, sizes)}


def run_prepared(case: Answer, sizes: Sizes) -> Answer:
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    from penstock import PreparedDataset
    from penstock.prepare import prepare

    out = Path(os.environ["PENSTOCK_CACHE"]) / "corpus"
    prepare(case["source"], tokenizer=case["tokenizer"], out=out)
    with loader_of(PreparedDataset(out, seq_len=SEQ_LEN), case["shuffle"]) as loader:
        return {f"prepared corpus, {case['order']}": tokens_per_s(loader, sizes)}


def run_torch(case: Answer, sizes: Sizes) -> Answer:
    from limit import MemoryMapRows, torch_batches

    rows = MemoryMapRows(token_file(sizes.file_batches))
    return {
        f"token file, DataLoader, {workers} workers": tokens_per_s(
            torch_batches(rows, workers), sizes
        )
        for workers in (0, WORKERS)
    }


def run_steps(case: Answer, sizes: Sizes) -> Answer:
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    with loader_of(text_of(case), shuffle=True) as loader:
        common.take_steps(loader, 10, lambda: time.sleep(STEP_S))
        told = common.take_steps(loader, sizes.steps, lambda: time.sleep(STEP_S))
    return {
        "next() p50": 1e6 * common.percentile(told["fetches"], 0.5),
        "next() p99": 1e6 * common.percentile(told["fetches"], 0.99),
        "data wait": 100 * sum(told["fetches"]) / told["wall"],
    }


def run_first_batch(case: Answer, sizes: Sizes) -> Answer:
    common.hide_torch()
    begun = time.perf_counter()
    loader = loader_of(text_of(case), case["shuffle"])
    if "state" in case:
        loader.load_state_dict(json.loads(state_file(case).read_text()))
    next(loader)
    took = time.perf_counter() - begun
    loader.shutdown()
    return {case["metric"]: took}


def state_file(case: Answer) -> Path:
    return Path(os.environ["PENSTOCK_CACHE"]) / f"{case['state']}.json"


def run_save(case: Answer, sizes: Sizes) -> Answer:
    """Save a state in the middle of a window, for a first batch of a resume."""
    with loader_of(text_of(case), case["shuffle"]) as loader:
        for _ in itertools.islice(loader, sizes.warm_batches):
            pass
        state_file(case).write_text(json.dumps(loader.state_dict()))
    return {}


def run_hub_pass(case: Answer, sizes: Sizes) -> Answer:
    """Read a dataset from the Hub once."""
    from penstock import AsyncDataLoader

    begun = time.perf_counter()
    with AsyncDataLoader(text_of(case), BATCH_SIZE, n_workers=WORKERS, epochs=1) as loader:
        batches = sum(1 for _ in loader)
        took, stats = time.perf_counter() - begun, loader.stats()
    return {
        "Hub, whole pass": batches * TOKENS / took / 1e6,
        "Hub, whole pass: requests": float(stats.requests),
        "Hub, whole pass: fetched": stats.fetched_bytes / 1e6,
        "Hub, whole pass: peak RSS": common.process_memory()["peak"] / 1e6,
    }


RUNS: dict[str, Callable[[Answer, Sizes], Answer]] = {
    "text": run_text,
    "limit": run_limit,
    "tokens": run_token_file,
    "prepared": run_prepared,
    "torch": run_torch,
    "steps": run_steps,
    "first": run_first_batch,
    "hub-pass": run_hub_pass,
    "save": run_save,
}


def work(case: Answer) -> None:
    """Run as a worker: import Penstock from the requested revision, and print the numbers."""
    common.silence_warnings()
    numbers = RUNS[case["run"]](case, QUICK if case["quick"] else Sizes())
    used = getattr(sys.modules.get("penstock"), "__file__", None)
    if used and not Path(used).is_relative_to(case["src"]):
        raise RuntimeError(f"penstock was imported from {used} instead of {case['src']}")
    print(json.dumps(numbers))


# The driver


@dataclass
class Case:
    """A benchmark case, and the revisions to run it on."""

    given: Mapping[str, Any]
    new_only: bool = False
    cache: str = "local"
    """Cases of one name share a cache, which is cleared for each round, except "local"."""
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Numbers by metric and revision."""


def cases_of(corpus: Corpus, quick: bool, endpoint: str) -> dict[str, Case]:
    copies = 1 if quick else common.COPIES
    local = {"source": str(corpus.copies(copies)), "tokenizer": str(corpus.tokenizer)}
    jsonl = local | {"source": str(corpus.copies(copies, "jsonl"))}
    hub = local | {"run": "first", "shuffle": True, "source": HUB_URL, "endpoint": endpoint}
    orders = {"in order": False, "shuffled": True}

    def ordered(run: str, order: str, **more: str) -> Case:
        return Case({"run": run, "order": order, "shuffle": orders[order]} | local | more)

    def first(metric: str, order: str, **state: str) -> Case:
        return ordered("first", order, metric=f"{metric}, {order}", **state)

    return {
        "text-in-order": ordered("text", "in order"),
        "text-shuffled": ordered("text", "shuffled"),
        "text-jsonl": Case({"run": "text", "order": "JSONL", "shuffle": False} | jsonl),
        "limit": Case({"run": "limit"} | local, new_only=True),
        "token-file": Case({"run": "tokens"}),
        "prepared-in-order": replace(ordered("prepared", "in order"), new_only=True),
        "prepared-shuffled": replace(ordered("prepared", "shuffled"), new_only=True),
        "torch": Case({"run": "torch"}, new_only=True),
        "steps": Case({"run": "steps"} | local),
        "first-in-order": first("first batch", "in order"),
        "first-shuffled": first("first batch", "shuffled"),
        "first-resume-save": ordered("save", "in order", state="a"),
        "first-resume-in-order": first("first batch of a resume", "in order", state="a"),
        "first-resume-save-shuffled": ordered("save", "shuffled", state="b"),
        "first-resume-shuffled": first("first batch of a resume", "shuffled", state="b"),
        "hub-cold": Case(hub | {"metric": "first batch, Hub, cold"}, cache="hub"),
        "hub-warm": Case(hub | {"metric": "first batch, Hub, warm"}, cache="hub"),
        "hub-pass": Case(hub | {"run": "hub-pass"}, cache="pass"),
    }


def cache_of(case: Case, src: Path) -> Path:
    return src.parent / f".cache-{case.cache}"


def run_case(case: Case, src: Path, quick: bool) -> Answer:
    """Run one worker."""
    place = str(cache_of(case, src))
    environment = common.clean_environment(PYTHONPATH=str(src), PENSTOCK_CACHE=place, HF_HOME=place)
    if endpoint := case.given.get("endpoint"):
        environment["HF_ENDPOINT"] = endpoint
    given = json.dumps({**case.given, "src": str(src), "quick": quick})
    done = subprocess.run(
        [sys.executable, __file__, "--contender", given],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"{given} exited with code {done.returncode}; see above")
    numbers: Answer = json.loads(done.stdout.splitlines()[-1])
    return numbers


def checkout(revision: str, folder: Path) -> Path:
    """Extract the sources of a revision. Return its src/."""
    command = ["git", "-C", str(common.REPO), "archive", "--format=tar", revision, "src"]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def measure(cases: Mapping[str, Case], sources: Mapping[str, Path], args: Any) -> None:
    """Run every case in each round, alternating the order of revisions."""
    for number in range(args.repeats):
        order = list(sources) if number % 2 == 0 else list(sources)[::-1]
        for case, src in itertools.product(cases.values(), sources.values()):
            if case.cache != "local":
                shutil.rmtree(cache_of(case, src), ignore_errors=True)
        for name, case in cases.items():
            begun = time.monotonic()
            for revision in order:
                if case.new_only and revision != "new":
                    continue
                for metric, value in run_case(case, sources[revision], args.quick).items():
                    by_revision = case.values.setdefault(metric, {"old": [], "new": []})
                    by_revision[revision].append(value)
            took = time.monotonic() - begun
            print(f"# round {number + 1} of {args.repeats}: {name}, {took:.0f} s", flush=True)


# The table

UNITS = {
    "text, in order": "M tokens/s",
    "text, shuffled": "M tokens/s",
    "text, JSONL": "M tokens/s",
    "decode + tokenize alone": "M tokens/s",
    "token file": "M tokens/s",
    "prepared corpus, in order": "M tokens/s",
    "prepared corpus, shuffled": "M tokens/s",
    "token file, DataLoader, 0 workers": "M tokens/s",
    "token file, DataLoader, 2 workers": "M tokens/s",
    "peak RSS, in order": "MB",
    "peak RSS, shuffled": "MB",
    "peak RSS, JSONL": "MB",
    "next() p50": "µs",
    "next() p99": "µs",
    "data wait": "%",
    "first batch, in order": "s",
    "first batch, shuffled": "s",
    "first batch of a resume, in order": "s",
    "first batch of a resume, shuffled": "s",
    "first batch, Hub, cold": "s",
    "first batch, Hub, warm": "s",
    "Hub, whole pass": "M tokens/s",
    "Hub, whole pass: requests": "",
    "Hub, whole pass: fetched": "MB",
    "Hub, whole pass: peak RSS": "MB",
}
RATIO_FLOORS = {
    "text, in order": Goal(">=", 0.9),
    "text, shuffled": Goal(">=", 0.9),
    "first batch, in order": Goal("<=", 1.2),
    "first batch, shuffled": Goal("<=", 1.2),
    "first batch, Hub, cold": Goal("<=", 1.4),
    "Hub, whole pass: peak RSS": Goal("<=", 1.1),
    "peak RSS, in order": Goal("<=", 1.1),
    "peak RSS, shuffled": Goal("<=", 1.1),
}
"""Bounds for new over old."""
VALUE_FLOORS = {
    "next() p50": Goal("<=", 300),
    "resume / fresh start, in order": Goal("<=", 1.3),
    "resume / fresh start, shuffled": Goal("<=", 1.3),
    "token file / DataLoader, 0 workers": Goal(">=", 4),
    "prepared, in order / DataLoader, 2 workers": Goal(">=", 4),
    "prepared, shuffled / DataLoader, 2 workers": Goal(">=", 4),
}
"""Bounds for the new value."""
SHARES = {
    "text, in order / limit": ("text, in order", "decode + tokenize alone"),
    "text, shuffled / limit": ("text, shuffled", "decode + tokenize alone"),
    "resume / fresh start, in order": (
        "first batch of a resume, in order",
        "first batch, in order",
    ),
    "resume / fresh start, shuffled": (
        "first batch of a resume, shuffled",
        "first batch, shuffled",
    ),
    "token file / DataLoader, 0 workers": ("token file", "token file, DataLoader, 0 workers"),
    "prepared, in order / DataLoader, 0 workers": (
        "prepared corpus, in order",
        "token file, DataLoader, 0 workers",
    ),
    "prepared, shuffled / DataLoader, 0 workers": (
        "prepared corpus, shuffled",
        "token file, DataLoader, 0 workers",
    ),
    "prepared, in order / DataLoader, 2 workers": (
        "prepared corpus, in order",
        "token file, DataLoader, 2 workers",
    ),
    "prepared, shuffled / DataLoader, 2 workers": (
        "prepared corpus, shuffled",
        "token file, DataLoader, 2 workers",
    ),
}
"""Rows that compare a row with a reference: of the same revision, or of the new one."""


def results_of(cases: Mapping[str, Case]) -> dict[str, dict[str, list[float]]]:
    """Collect the values of all cases, and compute the shares."""
    found: dict[str, dict[str, list[float]]] = {}
    for case in cases.values():
        found |= case.values
    for name, (over, under) in SHARES.items():
        if over in found and under in found:
            bases = {r: found[under][r] or found[under]["new"] for r in ("old", "new")}
            middle = {r: statistics.median(values) for r, values in bases.items()}
            found[name] = {r: [v / middle[r] for v in found[over][r]] for r in middle}
    return found


def rows_of(results: Mapping[str, Mapping[str, Sequence[float]]], quick: bool) -> list[list[str]]:
    """Return the table's rows. A quick run shows floors without a verdict."""

    def cell(values: Sequence[float]) -> str:
        if not values:
            return ""
        return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"

    rows = []
    for metric, values in results.items():
        old, new = values["old"], values["new"]
        ratio, floor = None, VALUE_FLOORS.get(metric)
        if old and all(old):
            ratio = statistics.median(common.ratios(new, old))
        reached = statistics.median(new)
        if metric in RATIO_FLOORS and ratio is not None:
            floor, reached = RATIO_FLOORS[metric], ratio
        verdict = "" if floor is None else str(floor)
        if floor is not None and not quick:
            verdict += "  met" if floor.met(reached) else "  MISSED"
        unit = UNITS.get(metric, "x" if "/" in metric else "ms")
        shown = "" if ratio is None else show(ratio)
        rows.append([metric, unit, cell(old), cell(new), shown, verdict])
    return rows


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--against", metavar="REV", help="the revision to compare with")
    options.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name contains one")
    options.add_argument("--data", type=Path, help="a Parquet file with a column `text`")
    options.add_argument("--tokenizer", type=Path, help="its tokenizer.json")
    options.add_argument("--json", type=Path, help="write the results into this file")
    args = options.parse_args()
    if args.contender is not None:
        work(args.contender)
        return
    args.repeats = args.repeats or (1 if args.quick else 5)
    corpus = load_corpus(args.quick, args.data, args.tokenizer)
    token_file((QUICK if args.quick else Sizes()).file_batches)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-compare-")))
        new = folder / "new" / "src"
        new.parent.mkdir()
        new.symlink_to(common.REPO / "src")
        sources = {"new": new}
        if args.against:
            sources = {"old": checkout(args.against, folder / "old"), "new": new}
        hosted = corpus.hosted("zstd", 250)
        hub = stack.enter_context(common.Hub(hosted, 100, *HUB_NETWORK))
        cases = cases_of(corpus, args.quick, hub.endpoint)
        if args.only:
            cases = {n: case for n, case in cases.items() if any(part in n for part in args.only)}
        first = {"source": str(corpus.parquet), "tokenizer": str(corpus.tokenizer)}
        for src in sources.values():  # compiles byte code, fills the cache
            run_case(Case({"run": "steps"} | first), src, quick=True)
        measure(cases, sources, args)
    results = results_of(cases)
    old = git("rev-parse", "--short=12", args.against) if args.against else ""
    commits = {"old": old, "new": machine()["commit"]}
    head = ("measure", "unit", f"old {commits['old']}", f"new {commits['new']}", "new/old", "floor")
    print(table(head, rows_of(results, args.quick)))
    if args.json:
        told = {"machine": machine(), "commits": commits, "corpus": corpus.name, "results": results}
        args.json.write_text(json.dumps(told | {"quick": args.quick}, indent=1) + "\n")


if __name__ == "__main__":
    main()
