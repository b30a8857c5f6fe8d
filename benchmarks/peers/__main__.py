"""How does Penstock do beside its peers, on the same work?

Parquet text → GPT-2's ids → packed batches of 16 × 1,024, all consumed: by Penstock, and by each peer
as its own documentation recommends, tuned for the machine; each peer that tokenizes on the fly once
more with Penstock's tokenizer. Every measurement is a fresh process in the peer's own environment.

drain:   first batch from the start of the process, tokens/s, CPU, memory with children, exit
hub:     the first batch from a Hub with latency
resume:  the first batch of a resume at 80 %; is the stream identical, once, twice, with one worker?
pace:    next() and data wait with a consumer that waits 20 ms after each batch

Writes results/peers.jsonl and peers.md. The environments (some gigabytes) and prepared formats are
kept in PENSTOCK_BENCH_DIR.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import environments
import page
from bench import QUICK, Bench, Sizes
from common import RESULTS, parser
from corpora import load_corpus
from report import Report, machine
from roster import ENTRANTS

PARTS = ("drain", "hub", "resume", "pace")
PACKAGES = {
    *("penstock", "gigatoken", "tokenizers", "tiktoken", "datasets", "torch", "torchdata"),
    *("grain", "spdl", "spdl-core", "litdata", "mosaicml-streaming", "lancedb"),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--only", nargs="+", help="peers whose name contains one of these")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 3)
    corpus = load_corpus(args.quick)
    entrants = [
        entrant
        for entrant in ENTRANTS
        if args.only is None
        or entrant.environment == "penstock"
        or any(name in entrant.name for name in args.only)
    ]
    settings = {"corpus": corpus.name, "repeats": repeats, "parts": list(args.parts)}
    report = Report("peers", args.quick, settings)
    bench = Bench(report, corpus, entrants, QUICK if args.quick else Sizes())
    installed: dict[str, str] = {}
    for name in sorted({entrant.environment for entrant in bench.entrants}):
        installed |= environments.versions(name)
    versions = {name: installed[name] for name in sorted(PACKAGES & installed.keys())}
    report.settings["versions"] = versions
    try:
        for part in args.parts:
            getattr(bench, part)(repeats)
    finally:
        bench.close()
        about = {"machine": machine(), "versions": versions}
        written = page.write(RESULTS, bench.entrants, bench.seen, about)
        report.close()
        print(written.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
