"""How does Penstock do beside its peers, on the same work?

Parquet text → GPT-2's ids → packed batches of 16 × 1,024, all consumed: by Penstock, and by each peer as its own
documentation recommends and tuned for the machine; each peer that tokenizes on the fly once more with Penstock's
tokenizer handed to it. Every measurement is a fresh process in the peer's own environment; all take turns.

drain:   time to the first batch from the start of the process, steady tokens/s, CPU, memory with children, exit
pace:    next() and data wait with a consumer that waits 5, 20 and 100 ms after each batch
resume:  from the start of the process to the first batch of a resume at 80 %; is the stream identical, once and twice?
workers: is the stream the same for one worker and two?
far:     the first batch from a Hub with latency
stall:   what happens when answers of the Hub stop half-way

It writes results/peers.jsonl, peers.md, peers.json, peers.svg and peers.png. The environments (some gigabytes) and
prepared formats are kept in PENSTOCK_BENCH_DIR.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from record import Report, machine

import environments
import page
from bench import QUICK, Bench, Sizes
from common import RESULTS, parser
from corpora import load_corpus
from roster import ENTRANTS, Entrant

PARTS = ("drain", "far", "resume", "workers", "pace", "stall")
NAMED = (
    "penstock",
    "gigatoken",
    "tokenizers",
    "tiktoken",
    "datasets",
    "torch",
    "torchdata",
    "grain",
    "spdl",
    "spdl-core",
    "litdata",
    "mosaicml-streaming",
)


def chosen(names: list[str] | None) -> list[Entrant]:
    """Those whose name contains one of these; the yardsticks and Penstock take part in any case."""
    return [
        entrant
        for entrant in ENTRANTS
        if names is None
        or entrant.environment == "penstock"
        or any(name in entrant.name for name in names)
    ]


def versions(entrants: list[Entrant]) -> dict[str, str]:
    """Of what matters."""
    found: dict[str, str] = {}
    for name in sorted({entrant.environment for entrant in entrants}):
        found |= {
            package: version
            for package, version in environments.versions(name).items()
            if package in NAMED
        }
    return found


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument(
        "--only", nargs="+", metavar="NAME", help="peers whose name contains one of these"
    )
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 3)
    corpus = load_corpus(args.quick)
    bench_sizes = QUICK if args.quick else Sizes()
    settings = {
        "corpus": corpus.name,
        "repeats": repeats,
        "parts": list(args.parts),
        "batch": [16, 1024],
    }
    report = Report("peers", args.quick, settings)
    bench = Bench(report, corpus, chosen(args.only), bench_sizes)
    report.settings["versions"] = versions(bench.entrants)
    try:
        for part in args.parts:
            if part in ("drain", "far", "pace"):
                getattr(bench, part)(repeats)
            elif part == "resume":
                bench.resume(1)
            else:
                getattr(bench, part)()
    finally:
        bench.close()
        about = {"machine": machine(), "versions": report.settings["versions"], "repeats": repeats}
        written = page.write(RESULTS, bench.entrants, bench.seen, about)
        subprocess.run(
            [str(environments.python("penstock")), str(HERE / "plots.py"), str(RESULTS)], check=True
        )
        report.close()
        print(written.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
