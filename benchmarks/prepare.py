"""Measure how fast a corpus is prepared and read, and what grows with its size.

write:  tokens/s, CPU and memory of `penstock.prepare`, of decode + tokenize alone, and of peers
        that write their own format: as documented, and with our tokenizer if they accept one.
read:   one pass over the result: PreparedDataset in order and globally shuffled, PyTorch's
        DataLoader over a file of ids, litdata's and MosaicML Streaming's loaders. Batches are
        tensors.
growth: the manifest, the first batch and the memory of a rank for 1,000 to 1,000,000 entries of 16
        blocks. They are simulated: the manifest repeats one real entry.

Every measurement is a fresh process in the contender's own environment (see peers/). Peers with
their own tokenizer are slow, so they get less text and one round. Prints Markdown.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers")]

import common
import environments
import watched
from case import Case
from corpora import load_corpus
from report import Report, machine, print_markdown, show

PARTS = ("write", "read", "growth")
ENTRIES = (1_000, 10_000, 100_000, 1_000_000)
BLOCKS = 16
OUR_PASSES = 6
"""A single pass takes less than a second, too short to measure."""
DEADLINE_S = 120.0


class Entrant(NamedTuple):
    """A writer, and a reader of its output."""

    name: str
    environment: str
    module: str
    variant: str
    tokenizer: str
    copies: int
    """Copies of the corpus to write."""
    reads: tuple[bool, ...] = ()
    """The orders to read in: shuffled or not."""


LIMIT, OURS = "decode + tokenize alone", "Penstock"
ENTRANTS = (
    Entrant(LIMIT, "penstock", "limits", "", "ours", 24),
    Entrant(OURS, "penstock", "ours", "prepared", "ours", 24, (False, True)),
    Entrant("PyTorch DataLoader, file of ids", "torch", "memory_map", "loader", "ours", 2, (True,)),
    Entrant("litdata + gigatoken", "litdata", "lit", "tokens", "ours", 2, (False,)),
    Entrant("MosaicML Streaming + gigatoken", "mosaic", "mosaic", "", "ours", 2, (False,)),
    Entrant("litdata", "litdata", "lit", "tokens", "own", 1),
    Entrant("MosaicML Streaming", "mosaic", "mosaic", "", "own", 1),
    Entrant("datatrove", "datatrove", "trove", "", "own", 2),
)
Seen = dict[str, dict[str, list[float]]]


class Bench:
    """One run."""

    def __init__(self, quick: bool) -> None:
        self._corpus, self._quick = load_corpus(quick), quick
        self._tokens = 0
        self.write: Seen = defaultdict(lambda: defaultdict(list))
        self.read: Seen = defaultdict(lambda: defaultdict(list))

    def case(self, entrant: Entrant) -> Case:
        folder = common.bench_folder(f"prepare/{entrant.module}-{entrant.tokenizer}-{self._quick}")
        copies = min(entrant.copies, 2) if self._quick else entrant.copies
        tokenizer: Any = entrant.tokenizer
        return Case(
            contender=entrant.module, variant=entrant.variant, tokenizer=tokenizer,
            source=str(self._corpus.copies(copies)), vocabulary=str(self._corpus.tokenizer),
            prepared=str(folder),
        )  # fmt: skip

    def tokens(self, case: Case) -> int:
        """Return the tokens of a case, counted once."""
        if not self._tokens:
            from penstock.prepare import prepare

            out = common.bench_folder(f"prepare/count-{self._quick}")
            source = self._corpus.copies(1)
            self._tokens = prepare(source, tokenizer=case.vocabulary, out=out).tokens
        return self._tokens * len(case.files())

    def measure_write(self, entrant: Entrant) -> None:
        case = self.case(entrant)
        shutil.rmtree(case.prepared)
        Path(case.prepared).mkdir()
        python = environments.python(entrant.environment)
        seen = watched.run(python, "prepare", case, deadline_s=DEADLINE_S)
        self._keep(f"write, {entrant.name}", self.write[entrant.name], seen, self.tokens(case))

    def measure_read(self, entrant: Entrant, shuffle: bool) -> None:
        tokenizer: Any = "none" if entrant.name != OURS else "own"
        passes = OUR_PASSES if entrant.name == OURS else 1
        case = replace(self.case(entrant), shuffle=shuffle, tokenizer=tokenizer, passes=passes)
        python = environments.python(entrant.environment)
        after = ("--after", "2" if self._quick else "200")
        seen = watched.run(python, "drain", case, *after, deadline_s=DEADLINE_S)
        name = f"{entrant.name}, {'shuffled' if shuffle else 'in order'}"
        self._keep(f"read, {name}", self.read[name], seen, int(seen.told.get("tokens", 0)))

    def _keep(
        self, name: str, values: dict[str, list[float]], seen: watched.Outcome, tokens: int
    ) -> None:
        if seen.what != "done":
            print(f"# {name} failed: {seen.why}\n{seen.last_words[-500:]}", flush=True)
            return
        rate, took = tokens / seen.told["seconds"] / 1e6, f"{seen.after_s:.0f} s in all"
        print(f"# {name}: {rate:.2f} M tokens/s, {took}", flush=True)
        values["M tokens/s"].append(rate)
        values["CPU s per M tokens"].append(seen.cpu_s / tokens * 1e6)
        values["peak MB"].append(seen.peak_bytes / 1e6)


def show_table(title: str, seen: Seen, bases: list[str], report: Report) -> None:
    """Print and record the medians of values and of ratios per round."""
    rate = "M tokens/s"
    rows = []
    for name, values in seen.items():
        if not values[rate]:
            rows.append([name, "failed"])
            continue
        for metric, numbers in values.items():
            report.add(f"{title}, {name}", metric, numbers, metric)
        medians = [show(statistics.median(numbers)) for numbers in values.values()]
        spread = f"{show(min(values[rate]))} to {show(max(values[rate]))}"
        pairs = [list(zip(seen[base][rate], values[rate], strict=False)) for base in bases]
        ratios = [show(statistics.median([a / b for a, b in each] or [0.0])) for each in pairs]
        rows.append([name, medians[0], spread, *medians[1:], *ratios])
    ratio_names = [f"{base} / this" for base in bases]
    print_markdown([title, rate, "range", "CPU s per M tokens", "peak MB", *ratio_names], rows)


# Growth


def simulate(entries: int) -> Path:
    """Return a corpus whose manifest repeats one real entry."""
    from penstock.prepare import manifest, prepare
    from penstock.read.token_store import TokenStore
    from penstock.types import ChunkRef

    folder = common.bench_folder(f"prepare/growth-{entries}")
    if not (folder / manifest.MANIFEST).exists():
        text = common.bench_folder("prepare/growth-text") / "a.jsonl"
        line = json.dumps({"text": "word " * 200}) + "\n"
        text.write_text(line * (BLOCKS * manifest.BLOCK_TOKENS // 1001))
        prepare(text, tokenizer="byte", out=folder)
        store = TokenStore(folder)
        known = manifest.read_manifest(store)
        plan = {
            name: known.about[name]
            for name in ("format", "penstock", "settings", "tokenizer", "files")
        }
        ref = ChunkRef(known.files[0], 0, 0)
        header = store.header(known.names[0].as_py())
        manifest.write_manifest(store, plan, known.files, [(ref, header)] * entries, {})
    return folder


def first_batch(folder: str) -> dict[str, float]:
    """Open a corpus as one rank does."""
    from penstock import AsyncDataLoader, PreparedDataset

    begun = time.perf_counter()
    data = PreparedDataset(folder, seq_len=1024)
    opened = time.perf_counter() - begun
    with AsyncDataLoader(data, 16, shuffle=True, n_workers=1) as loader:
        next(loader)
        first = time.perf_counter() - begun
    return {"opened": opened, "first": first, "peak": common.process_memory()["peak"] / 1e6}


def growth(sizes: tuple[int, ...], report: Report) -> None:
    rows = []
    for entries in sizes:
        folder = simulate(entries)
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        command = [sys.executable, __file__, "--contender", json.dumps(str(folder))]
        told = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
        cells = [size / 1e6, told["opened"], told["first"], told["peak"]]
        rows.append([f"{entries:,}", f"{entries * BLOCKS * 65536 / 1e9:,.0f} G", *map(show, cells)])
        for name, value in told.items():
            report.add(f"{entries:,} entries", name, value, "MB" if name == "peak" else "s")
    head = ["entries", "tokens", "manifest MB", "opened s", "first batch s", "peak MB of a rank"]
    print_markdown(head, rows)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = options.parse_args()
    if args.contender is not None:
        common.silence_warnings()
        print(json.dumps(first_batch(args.contender)))
        return
    repeats = args.repeats or (1 if args.quick else 3)
    bench, about = Bench(args.quick), machine()
    report = Report("prepare", args.quick, {"repeats": repeats})
    entrants = [each for each in ENTRANTS if _installed(each)]
    print(
        f"# {about['cores']} cores, others busy {about['others_busy_percent']} %, {about['commit']}"
    )
    for number in range(repeats):
        for entrant in entrants:
            if "write" in args.only and (entrant.tokenizer == "ours" or number == 0):
                bench.measure_write(entrant)
            for shuffle in entrant.reads if "read" in args.only else ():
                bench.measure_read(entrant, shuffle)
    if "write" in args.only:
        show_table("write", bench.write, [OURS], report)
    if "read" in args.only:
        show_table("read", bench.read, list(bench.read)[:2], report)
    if "growth" in args.only:
        growth(ENTRIES[: 1 if args.quick else None], report)


def _installed(entrant: Entrant) -> bool:
    try:
        environments.python(entrant.environment)
    except environments.NotInstalled as error:
        print(f"# {entrant.name} is left out: {error}", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
