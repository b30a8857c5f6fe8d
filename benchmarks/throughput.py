"""How many tokens a second become batches: from text, and from a file of ids?

Text:   Parquet in order and shuffled, and JSONL, 1 and 2 workers, beside decode + tokenize alone on
        as many threads (of the Parquet). Tokens are the ids of documents, without separators. The loader has to give exactly
        as many as the limit. The clock includes filling and draining the pipeline.
Ids:    a memory-mapped file of random uint16, all rows shuffled, as tensors, beside PyTorch's
        DataLoader over an np.memmap.

Every contender has its own process and makes one pass before it is measured: everything is warm.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, SEQ_LEN, TOKENS, Answer
from corpora import Corpus, load_corpus, token_file
from limit import DecodeAndTokenize
from report import Goal, Report

DATALOADER_GOAL = Goal(">=", 4)
PASSES = 2
PARTS = ("text", "ids")

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


# Files of ids: each contender is an endless stream of batches


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


def ids_measure(case: Answer, stack: ExitStack) -> Callable[[], Answer]:
    import torch  # noqa: F401 (batches are tensors on all sides)

    from penstock import AsyncDataLoader, TokenFileDataset

    path, workers = token_file(case["batches"]), case["workers"]
    source: Iterator[Any]
    if case["loader"] == "penstock":
        data = TokenFileDataset.from_binary_file(path, SEQ_LEN)
        loader = AsyncDataLoader(data, BATCH_SIZE, shuffle=True, seed=7, n_workers=workers)
        source = iter(stack.enter_context(loader))
    else:
        source = torch_batches(MemoryMapRows(path), workers)
    checksum = sum(int(inputs.sum()) for inputs, _ in itertools.islice(source, case["batches"]))

    def measure() -> Answer:
        batches = 0
        begun = now = time.perf_counter()
        while now < begun + case["seconds"]:
            next(source)
            batches += 1
            now = time.perf_counter()
        return {"seconds": now - begun, "tokens": batches * TOKENS, "checksum": checksum}

    return measure


def measure_ids(report: Report, quick: bool, repeats: int) -> None:
    batches = 60 if quick else 6104
    token_file(batches)
    base = {"what": "ids", "batches": batches, "seconds": 0.05 if quick else 0.6}
    cases: dict[str, Answer] = {}
    for loader, workers in itertools.product(("penstock", "torch"), (0, 2)):
        name = f"{'Penstock' if loader == 'penstock' else 'DataLoader'}, {workers} workers"
        cases[name] = base | {"loader": loader, "workers": workers}
    answers = common.measure_all(__file__, cases, repeats)
    if len({given[0]["checksum"] for given in answers.values()}) > 1:
        raise RuntimeError("a pass has to give every row once, and the sums of the ids differ")
    rates = {name: [rate(answer) for answer in given] for name, given in answers.items()}
    torch_rates = (values for name, values in rates.items() if name.startswith("DataLoader"))
    best = [max(pair) for pair in zip(*torch_rates, strict=True)]
    for name, values in rates.items():
        report.add("file of ids", name, values, "M tokens/s")
    for name in ("Penstock, 0 workers", "Penstock, 2 workers"):
        of_best = common.ratios(rates[name], best)
        report.add("file of ids", f"{name} / DataLoader", of_best, "x", DATALOADER_GOAL)


def contend(case: Answer) -> None:
    """Be one contender."""
    common.silence_warnings()
    what = case.pop("what")
    if what == "ids":
        with ExitStack() as stack:
            common.serve(ids_measure(case, stack))
        return
    run = text_pass(**case) if what == "text" else limit_pass(**case)
    run()
    common.serve(run)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="for text")
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (1 if args.quick else 7)
    corpus = load_corpus(args.quick)
    settings = {"corpus": corpus.name, "batch": [BATCH_SIZE, SEQ_LEN], "repeats": repeats}
    report = Report("throughput", args.quick, settings)
    if "text" in args.only:
        measure_text(report, corpus, args, repeats)
    if "ids" in args.only:
        measure_ids(report, args.quick, repeats)
    report.close()


if __name__ == "__main__":
    main()
