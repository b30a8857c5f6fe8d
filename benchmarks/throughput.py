"""How many tokens a second become batches: from text, from a file of ids, from the token cache?

Text:   Parquet and JSONL, in order and shuffled, 1 and 2 workers, beside decode + tokenize alone on
        as many threads, and beside the loop that people write first (`tokenizers`, one document at
        a time). Tokens are the ids of documents, without separators. The loader has to give exactly
        as many as the limit. The clock includes filling and draining the pipeline.
Ids:    a memory-mapped file of random uint16, all rows shuffled, as tensors, beside a bare loop of
        one gather and two widening copies, and beside PyTorch's DataLoader over an np.memmap.
Cache:  the token cache, filled from a loopback Hub that is gone when it is read, beside tokenizing
        the same files from disk. A single request, or a chunk that was not cached, is an error.

Every contender has its own process and makes one pass before it is measured: everything is warm.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import (
    BATCH_SIZE,
    COPIES,
    HOSTED,
    HUB_URL,
    SEQ_LEN,
    TOKENS,
    Answer,
    Contender,
    Hub,
    measure_all,
    parser,
    ratios,
    serve,
    silence_warnings,
)
from corpora import Corpus, link, load_corpus, token_file
from limit import DecodeAndTokenize
from report import Goal, Report

DOCUMENTS = 500
"""Documents of a row group of the cached files: 3 MB of text."""
FILLS = 10
"""Passes after which the cache has to be full."""
DATALOADER_GOAL = Goal(">=", 4)
PARTS = ("text", "ids", "cache")

Pair = tuple[Any, Any]


def rate(answer: Answer) -> float:
    """Return millions of tokens a second."""
    return float(answer["tokens"] / answer["seconds"] / 1e6)


# Text


def text_pass(source: str, tokenizer: str, **options: Any) -> Callable[[int], Answer]:
    """Return a function that reads the text N times with a new loader."""
    from penstock import AsyncDataLoader, TextDataset

    cache = options.pop("cache", False)
    data = TextDataset(source, tokenizer=tokenizer, seq_len=SEQ_LEN, cache=cache)

    def run(passes: int) -> Answer:
        begun = time.perf_counter()
        with AsyncDataLoader(data, BATCH_SIZE, seed=7, epochs=passes, **options) as loader:
            for _ in loader:
                pass
            seconds = time.perf_counter() - begun
            stats = loader.stats()
        if cache and (stats.cache_misses or stats.requests):
            missed = f"{stats.cache_misses} chunks were not cached, {stats.requests} requests made"
            raise RuntimeError(f"{missed}: this does not measure the cache alone")
        # The last id is not an input, and each document ends with a separator.
        ids = stats.tokens - stats.padded_tokens + 1 - (stats.documents - stats.empty)
        return {"seconds": seconds, "tokens": ids}

    return run


def limit_pass(source: str, tokenizer: str, n_workers: int) -> Callable[[int], Answer]:
    limit = DecodeAndTokenize(sorted(Path(source).iterdir()), tokenizer, n_workers)

    def run(passes: int) -> Answer:
        begun = time.perf_counter()
        ids = sum(sum(limit.counts()) for _ in range(passes))
        return {"seconds": time.perf_counter() - begun, "tokens": ids}

    return run


def plain_pass(path: str, tokenizer: str, documents: int) -> Callable[[int], Answer]:
    """Read, encode each document, append to a list, cut rows."""
    import numpy as np
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    eos = encoder.token_to_id("<|endoftext|>")

    def run(_: int) -> Answer:
        buffer: list[int] = []
        total = 0
        begun = time.perf_counter()
        texts = next(pq.ParquetFile(path).iter_batches(documents, columns=["text"])).column(0)
        for text in texts.to_pylist():
            ids = encoder.encode(text).ids
            total += len(ids)
            buffer += [*ids, eos]
            while len(buffer) > TOKENS:
                flat = np.array(buffer[: TOKENS + 1])
                _ = flat[:-1].reshape(BATCH_SIZE, SEQ_LEN), flat[1:].reshape(BATCH_SIZE, SEQ_LEN)
                del buffer[:TOKENS]
        return {"seconds": time.perf_counter() - begun, "tokens": total}

    return run


def measure_text(report: Report, corpus: Corpus, args: Any, repeats: int) -> None:
    copies, kinds = (1 if args.quick else COPIES), ("parquet", "jsonl")
    tokenizer = str(corpus.tokenizer)
    for kind, workers in itertools.product(kinds, args.workers):
        source = str(corpus.copies(copies, "jsonl" if kind == "jsonl" else "parquet"))
        base = {"source": source, "tokenizer": tokenizer, "n_workers": workers, "passes": 2}
        cases: dict[str, Answer] = {
            "decode + tokenize alone": base | {"what": "limit"},
            "in order": base | {"what": "text", "shuffle": False},
            "shuffled": base | {"what": "text", "shuffle": True},
        }
        if kind == "parquet":
            few = 20 if args.quick else 300
            plain = {"path": str(corpus.parquet), "tokenizer": tokenizer, "documents": few}
            cases["plain loop"] = plain | {"what": "plain", "passes": 1}
        answers = measure_all(__file__, cases, repeats)
        limit = answers["decode + tokenize alone"]
        title = f"{kind}, {workers} worker(s)"
        rates = {name: [rate(answer) for answer in given] for name, given in answers.items()}
        for name, values in rates.items():
            report.add(title, name, values, "M tokens/s")
        for name in ("in order", "shuffled"):
            given, wanted = answers[name][0]["tokens"], limit[0]["tokens"]
            if given != wanted:
                raise RuntimeError(f"{title}: the loader gave {given} ids, the limit {wanted}")
            of_limit = ratios(rates[name], rates["decode + tokenize alone"])
            report.add(title, f"{name} / limit", of_limit, "x")
            if "plain loop" in rates:
                times = ratios(rates[name], rates["plain loop"])
                report.add(title, f"{name} / plain loop", times, "x")


# Files of ids: each contender is an endless stream of batches


def bare_batches(path: Path) -> Iterator[Pair]:
    """Only the copies: the order is known, the map is open."""
    import numpy as np
    import torch

    ids = np.asarray(np.memmap(path, np.uint16, "r"))  # np.memmap runs Python when it is indexed
    rows = np.lib.stride_tricks.sliding_window_view(ids, SEQ_LEN + 1)[::SEQ_LEN]
    order = np.random.default_rng(0).permutation(len(rows)).reshape(-1, BATCH_SIZE)
    for batch in itertools.cycle(order):
        gathered = rows[batch]
        inputs, targets = gathered[:, :-1].astype(np.int64), gathered[:, 1:].astype(np.int64)
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


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
    elif case["loader"] == "torch":
        source = torch_batches(MemoryMapRows(path), workers)
    else:
        source = bare_batches(path)
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
    base = {"what": "ids", "batches": 60, "seconds": 0.05}
    if not quick:
        base |= {"batches": 6104, "seconds": 0.6}
    token_file(int(base["batches"]))
    cases: dict[str, Answer] = {"bare loop": base | {"loader": "bare", "workers": 0}}
    for loader, workers in itertools.product(("penstock", "torch"), (0, 2)):
        name = f"{'Penstock' if loader == 'penstock' else 'DataLoader'}, {workers} workers"
        cases[name] = base | {"loader": loader, "workers": workers}
    answers = measure_all(__file__, cases, repeats)
    if len({given[0]["checksum"] for given in answers.values()}) > 1:
        raise RuntimeError("a pass has to give every row once, and the sums of the ids differ")
    rates = {name: [rate(answer) for answer in given] for name, given in answers.items()}
    torch_rates = (values for name, values in rates.items() if name.startswith("DataLoader"))
    best = [max(pair) for pair in zip(*torch_rates, strict=True)]
    for name, values in rates.items():
        report.add("file of ids", name, values, "M tokens/s")
    for name in ("Penstock, 0 workers", "Penstock, 2 workers"):
        of_best, bare = ratios(rates[name], best), ratios(rates[name], rates["bare loop"])
        report.add("file of ids", f"{name} / DataLoader", of_best, "x", DATALOADER_GOAL)
        report.add("file of ids", f"{name} / bare loop", bare, "x")


# The token cache


def fill_cache(source: str, tokenizer: str) -> Answer:
    """Read the text until all of it is in the cache: what the disk is too slow for is left out."""
    from penstock import AsyncDataLoader, TextDataset

    data = TextDataset(source, tokenizer=tokenizer, seq_len=SEQ_LEN, cache=True)
    for _ in range(FILLS):
        with AsyncDataLoader(data, BATCH_SIZE, shuffle=False, epochs=1) as loader:
            for _ in loader:
                pass
            stats = loader.stats()
        if stats.cache_misses == 0:
            return {"chunks": stats.cache_hits}
    raise RuntimeError(f"after {FILLS} passes {stats.cache_misses} chunks are not cached")


def measure_cache(report: Report, corpus: Corpus, quick: bool, repeats: int) -> None:
    hosted, copies = corpus.hosted("zstd", DOCUMENTS), 2 if quick else COPIES
    with tempfile.TemporaryDirectory() as place:
        for i in range(copies):
            link(hosted / HOSTED, Path(place) / f"{i:02}.parquet")
        with Hub(hosted, copies) as hub:
            url = f"{HUB_URL}@{hub.commit()}"
            env = {"PENSTOCK_CACHE": f"{place}/cache", "HF_ENDPOINT": hub.endpoint}
            base: Answer = {"env": env, "tokenizer": str(corpus.tokenizer)}
            with Contender(__file__, base | {"what": "fill", "source": url}) as process:
                chunks = process.ready().measure()["chunks"]
        base |= {"what": "text", "n_workers": 2, "passes": 2}
        cases: dict[str, Answer] = {}
        for order, shuffle in (("in order", False), ("shuffled", True)):
            cases[order] = base | {"source": url, "shuffle": shuffle, "cache": True}
            cases[f"tokenized again, {order}"] = base | {"source": place, "shuffle": shuffle}
        answers = measure_all(__file__, cases, repeats)
    rates = {name: [rate(answer) for answer in given] for name, given in answers.items()}
    for name, values in rates.items():
        report.add("token cache", name, values, "M tokens/s", chunks=chunks)
    for order in ("in order", "shuffled"):
        times = ratios(rates[order], rates[f"tokenized again, {order}"])
        report.add("token cache", f"{order} / tokenized again", times, "x")


def contend(case: Answer) -> None:
    """Be one contender."""
    silence_warnings()
    os.environ |= case.pop("env", {})
    what = case.pop("what")
    if what == "ids":
        with ExitStack() as stack:
            serve(ids_measure(case, stack))
        return
    if what == "fill":
        serve(lambda: fill_cache(**case))
        return
    passes = case.pop("passes")
    run = {"text": text_pass, "limit": limit_pass, "plain": plain_pass}[what](**case)
    run(1)
    serve(lambda: run(passes))


def main() -> None:
    options = parser(__doc__)
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
    if "cache" in args.only:
        measure_cache(report, corpus, args.quick, repeats)
    report.close()


if __name__ == "__main__":
    main()
