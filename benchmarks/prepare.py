"""How fast is a corpus prepared, and how fast is it read?

`penstock.prepare` into an empty folder on disk, and one pass of PreparedDataset over the result, beside
decode + tokenize alone on as many threads. Tokens are the ids of documents, with separators where they are
written. Every contender has its own process; tokenizers are warm.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import common
from common import BATCH_SIZE, SEQ_LEN, Answer
from corpora import load_corpus
from limit import DecodeAndTokenize
from penstock import AsyncDataLoader, PreparedDataset
from penstock.encode.tokenizer import load_tokenizer
from penstock.prepare import prepare
from report import Goal, Report

limit, load = cache(DecodeAndTokenize), cache(load_tokenizer)  # kept, so that they are warm
LIMIT, WRITE = "decode + tokenize alone", "prepare"


def pass_of(what: str, source: str, tokenizer: str, out: str) -> Callable[[], int]:
    """Return a function that makes one pass, and returns its tokens."""
    if what == LIMIT:
        return lambda: sum(limit(tuple(Path(source).iterdir()), tokenizer, 2).counts())
    if what == WRITE:
        shutil.rmtree(out, ignore_errors=True)
        return lambda: prepare(source, tokenizer=load(tokenizer), out=out, workers=2).tokens
    data, shuffle = PreparedDataset(out, seq_len=SEQ_LEN), what == "read, shuffled"
    loader = AsyncDataLoader(data, BATCH_SIZE, shuffle=shuffle, epochs=1, n_workers=2)
    return lambda: sum(batch.tokens for batch in loader)


def contend(case: Answer) -> None:
    """Be one contender."""
    common.silence_warnings()
    pass_of(**case)()

    def measure() -> Answer:
        run = pass_of(**case)
        begun, cpu = time.perf_counter(), time.process_time()
        answer: Answer = {"tokens": run(), "seconds": time.perf_counter() - begun}
        return answer | {"cpu": time.process_time() - cpu} | common.process_memory()

    common.serve(measure)


def main() -> None:
    args = common.parser(__doc__).parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats, corpus = args.repeats or (1 if args.quick else 5), load_corpus(args.quick)
    source, out = corpus.copies(1 if args.quick else common.COPIES), common.bench_folder("prepared")
    base = {"source": str(source), "tokenizer": str(corpus.tokenizer), "out": str(out / "read")}
    pass_of(WRITE, **base)()
    cases = {what: base | {"what": what} for what in (LIMIT, "read, in order", "read, shuffled")}
    cases[WRITE] = base | {"what": WRITE, "out": str(out / "write")}
    report = Report("prepare", args.quick, {"corpus": corpus.name, "repeats": repeats})
    rates = {}
    for name, given in common.measure_all(__file__, cases, repeats).items():
        rates[name] = [answer["tokens"] / answer["seconds"] / 1e6 for answer in given]
        report.add(name, "rate", rates[name], "M tokens/s")
        report.add(name, "CPU", [1e9 * a["cpu"] / a["tokens"] for a in given], "ns/token")
        report.add(name, "peak memory", [a["peak"] / 1e6 for a in given], "MB")
    report.add(WRITE, "/ limit", common.ratios(rates[WRITE], rates[LIMIT]), "x", Goal(">=", 0.7))
    report.close()


if __name__ == "__main__":
    main()
