"""How many tokens a second become batches from text?

Parquet in order and shuffled, and JSONL, 1 and 2 workers, beside decode + tokenize alone on as many threads (of
the Parquet). Tokens are the ids of documents, without separators. The loader has to give exactly as many as the
limit. The clock includes filling and draining the pipeline. `compare.py` measures files of ids.

Every contender has its own process and makes one pass before it is measured: everything is warm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, SEQ_LEN, Answer
from corpora import Corpus, load_corpus
from limit import DecodeAndTokenize
from report import Report

PASSES = 2

Pair = tuple[Any, Any]


def rate(answer: Answer) -> float:
    """Return millions of tokens a second."""
    return float(answer["tokens"] / answer["seconds"] / 1e6)


# Text


def text_pass(source: str, tokenizer: str, **options: Any) -> Callable[[], Answer]:
    """Return a function that reads the text twice with a new loader."""
    from penstock import AsyncDataLoader, TextDataset

    data = TextDataset(source, tokenizer=tokenizer, seq_len=SEQ_LEN)

    def run() -> Answer:
        begun = time.perf_counter()
        with AsyncDataLoader(data, BATCH_SIZE, seed=7, epochs=PASSES, **options) as loader:
            for _ in loader:
                pass
            seconds = time.perf_counter() - begun
            stats = loader.stats()
        # The last id is not an input, and each document ends with a separator.
        ids = stats.tokens - stats.padded_tokens + 1 - (stats.documents - stats.empty)
        return {"seconds": seconds, "tokens": ids}

    return run


def limit_pass(source: str, tokenizer: str, n_workers: int) -> Callable[[], Answer]:
    limit = DecodeAndTokenize(sorted(Path(source).iterdir()), tokenizer, n_workers)

    def run() -> Answer:
        begun = time.perf_counter()
        ids = sum(sum(limit.counts()) for _ in range(PASSES))
        return {"seconds": time.perf_counter() - begun, "tokens": ids}

    return run


def measure_text(report: Report, corpus: Corpus, args: Any, repeats: int) -> None:
    copies, tokenizer = 1 if args.quick else common.COPIES, str(corpus.tokenizer)
    parquet, jsonl = (str(corpus.copies(copies, kind)) for kind in ("parquet", "jsonl"))
    for workers in args.workers:
        base: Answer = {"source": parquet, "tokenizer": tokenizer, "n_workers": workers}
        cases = {
            "decode + tokenize alone": base | {"what": "limit"},
            "in order": base | {"what": "text", "shuffle": False},
            "shuffled": base | {"what": "text", "shuffle": True},
            "JSONL, in order": base | {"what": "text", "shuffle": False, "source": jsonl},
        }
        answers = common.measure_all(__file__, cases, repeats)
        title = f"text, {workers} worker(s)"
        rates = {name: [rate(answer) for answer in given] for name, given in answers.items()}
        for name, values in rates.items():
            report.add(title, name, values, "M tokens/s")
        wanted = answers["decode + tokenize alone"][0]["tokens"]
        for name in ("in order", "shuffled", "JSONL, in order"):
            if (given := answers[name][0]["tokens"]) != wanted:
                raise RuntimeError(f"{title}: the loader gave {given} ids, the limit {wanted}")
            limit = rates["decode + tokenize alone"]
            report.add(title, f"{name} / limit", common.ratios(rates[name], limit), "x")


# PyTorch's way with files of ids, for other benchmarks


class MemoryMapRows:
    """A map-style dataset as users of nanoGPT write it: a slice of the map for each sample."""

    def __init__(self, path: Path) -> None:
        import numpy as np
        import torch

        self._ids = np.memmap(path, np.uint16, "r")
        self._int64, self._tensor = np.int64, torch.from_numpy

    def __len__(self) -> int:
        return (len(self._ids) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> Pair:
        row = self._ids[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].astype(self._int64)
        return self._tensor(row[:-1]), self._tensor(row[1:])


def torch_batches(data: Any, workers: int, batch_size: int = BATCH_SIZE) -> Iterator[Any]:
    """Yield batches of PyTorch's DataLoader, epoch after epoch, from the same workers."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        data, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def contend(case: Answer) -> None:
    """Be one contender."""
    common.silence_warnings()
    run = text_pass(**case) if case.pop("what") == "text" else limit_pass(**case)
    run()
    common.serve(run)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="for text")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (1 if args.quick else 7)
    corpus = load_corpus(args.quick)
    settings = {"corpus": corpus.name, "batch": [BATCH_SIZE, SEQ_LEN], "repeats": repeats}
    report = Report("throughput", args.quick, settings)
    measure_text(report, corpus, args, repeats)
    report.close()


if __name__ == "__main__":
    main()
