"""Check that memory stays constant while a loader streams.

Streams two kinds of text at full speed in fresh processes: the corpus, repeated, and random words
that do not repeat, so that a tokenizer's cache never hits. Samples memory that is not backed by a
file every second. The slope over the second half is Theil-Sen's: the median of the slopes between
all pairs of samples, which is robust against a sawtooth.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from pathlib import Path

import common
from common import BATCH_SIZE, MB, SEQ_LEN, Answer
from corpora import load_corpus, write_parquet
from report import Report

DOC_BYTES = 6000
GROUP_DOCS = 1000


def new_words(files: int, groups: int) -> Path:
    """Return a folder of Parquet files of random words of 4 to 12 letters."""
    import numpy as np
    import pyarrow as pa

    folder = common.bench_folder(f"new-words-{files}x{groups}")
    size = DOC_BYTES * GROUP_DOCS * groups
    for i in range(files):
        path = folder / f"part-{i:02}.parquet"
        if path.exists():
            continue
        random = np.random.default_rng(i)
        letters = random.integers(ord("a"), ord("z") + 1, size, np.uint8)
        blanks = np.cumsum(random.integers(5, 14, size // 5))
        letters[blanks[blanks < size]] = ord(" ")
        offsets = np.arange(0, size + 1, DOC_BYTES, dtype=np.int64)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
        texts = pa.Array.from_buffers(pa.large_string(), GROUP_DOCS * groups, buffers)
        write_parquet(path.with_suffix(".tmp"), {"text": texts}, GROUP_DOCS)
        path.with_suffix(".tmp").rename(path)
    return folder


def stream(case: Answer, quick: bool) -> Answer:
    """Stream one kind of text, and sample memory on another thread."""
    import torch  # noqa: F401 (as in a training script: batches are tensors)

    from penstock import AsyncDataLoader, TextDataset

    corpus = load_corpus(quick)
    data = TextDataset(case["source"], tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
    samples: list[tuple[float, float]] = []
    ended = threading.Event()
    begun = time.monotonic()

    def sample() -> None:
        while not ended.wait(1.0):
            samples.append((time.monotonic() - begun, common.process_memory()["anonymous"] / MB))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with AsyncDataLoader(data, BATCH_SIZE, shuffle=True, n_workers=case["workers"]) as loader:
            while time.monotonic() < begun + case["seconds"]:
                next(loader)
            stats = loader.stats()
    finally:
        ended.set()
        sampler.join()
    seconds, peak = time.monotonic() - begun, common.process_memory()["peak"] / MB
    return {"samples": samples, "peak": peak, "rate": stats.tokens / seconds / 1e6}


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--seconds", type=float, help="how long to stream each kind (120)")
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()
    if args.contender is not None:
        common.silence_warnings()
        common.serve(lambda: stream(args.contender, args.quick))
        return
    seconds = args.seconds or (5.0 if args.quick else 120.0)
    corpus = load_corpus(args.quick)
    sources = {
        "corpus": corpus.copies(common.COPIES),
        "new words": new_words(2, 2) if args.quick else new_words(8, 8),
    }
    settings = {"corpus": corpus.name, "seconds": seconds, "workers": args.workers}
    report = Report("memory", args.quick, settings)
    cases = {
        kind: {"source": str(source), "seconds": seconds, "workers": args.workers}
        for kind, source in sources.items()
    }
    for kind, (run,) in common.measure_all(__file__, cases, 1, quick=args.quick).items():
        samples = run["samples"]
        half = samples[len(samples) // 2 :]
        slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(half, 2)]
        level = statistics.median(size for _, size in half)
        growth = 100 * statistics.median(slopes) * (half[-1][0] - half[0][0]) / level
        report.add(kind, "anonymous, second half", [s for _, s in half], "MB", samples=samples)
        report.add(kind, "growth over the second half", growth, "%")
        report.add(kind, "peak RSS", run["peak"], "MB")
        report.add(kind, "rate", run["rate"], "M tokens/s")
    report.close()


if __name__ == "__main__":
    main()
