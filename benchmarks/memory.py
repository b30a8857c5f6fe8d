"""Does memory stay flat while a loader streams for as long as one likes?

Two kinds of text, each streamed flat out in a fresh process: the corpus, over and over, and 384 MB
of words that do not repeat, many times what a tokenizer's instance sees before its cache has grown
so large that it is replaced. Sampled each second: memory that no file backs (RssAnon). The slope
is Theil-Sen's over the second half: the median of the slopes between all pairs of samples, which a
sawtooth does not impress.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import Goal, Report
from rounds import Contender, process_memory, serve

from common import BATCH_SIZE, COPIES, MB, SEQ_LEN, bench_folder, parser
from corpora import load_corpus

KINDS = ("corpus", "new words")
DOC_BYTES = 6000
GROUP_DOCS = 1000
FLAT_PERCENT = 5.0
"""Growth over the second half, in percent of its median, below which memory counts as flat."""


def new_words(files: int, groups: int) -> Path:
    """A folder of Parquet files of random words of 4 to 12 letters: next to none occurs twice."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = bench_folder(f"new-words-{files}x{groups}")
    for i in range(files):
        path = folder / f"part-{i:02}.parquet"
        if path.exists():
            continue
        random = np.random.default_rng(i)
        size = DOC_BYTES * GROUP_DOCS
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with pq.ParquetWriter(
            temporary, pa.schema([("text", pa.large_string())]), compression="zstd"
        ) as writer:
            for _ in range(groups):
                letters = random.integers(ord("a"), ord("z") + 1, size, np.uint8)
                blanks = np.cumsum(random.integers(5, 14, size // 5))
                letters[blanks[blanks < size]] = ord(" ")
                offsets = np.arange(0, size + 1, DOC_BYTES, dtype=np.int64)
                buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
                writer.write_table(
                    pa.table(
                        {"text": pa.Array.from_buffers(pa.large_string(), GROUP_DOCS, buffers)}
                    ),
                    row_group_size=GROUP_DOCS,
                )
        os.replace(temporary, path)
    return folder


def contend(case: dict[str, Any], quick: bool) -> None:
    """Stream one kind of text, and sample."""
    import pyarrow as pa

    from penstock import AsyncDataLoader, TextDataset

    corpus = load_corpus(quick)
    folder = (
        corpus.copies(COPIES)
        if case["kind"] == "corpus"
        else new_words(case["files"], case["groups"])
    )
    data = TextDataset(folder, tokenizer=corpus.tokenizer, seq_len=SEQ_LEN)
    engine: Any = data.tokenizer.engine

    def stream() -> dict[str, Any]:
        samples: list[list[float]] = []
        ended = threading.Event()
        begun = time.monotonic()

        def sample() -> None:
            # On a thread of its own: next() may wait for a whole window of slow text.
            while True:
                now = process_memory()
                at = time.monotonic() - begun
                samples.append(
                    [at, now["anonymous"] / MB, now["rss"] / MB, pa.total_allocated_bytes() / MB]
                )
                if ended.wait(max(0.0, len(samples) - at)):
                    return

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            with AsyncDataLoader(
                data, BATCH_SIZE, shuffle=True, n_workers=case["workers"], output="numpy"
            ) as loader:
                while time.monotonic() < begun + case["seconds"]:
                    next(loader)
                ended.set()
                sampler.join()
                stats = loader.stats()
        finally:
            ended.set()
            sampler.join()
        return {
            "samples": samples,
            "peak": process_memory()["peak"] / MB,
            "replaced": getattr(engine, "replaced", 0),
            "text": stats.text_bytes / MB,
            "tokens": stats.tokens / 1e6,
        }

    serve(stream)


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs."""
    return statistics.median(
        (d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(points, 2) if c > a
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, help="how long to stream each kind of text")
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender, args.quick)
        return
    seconds = args.seconds or (5.0 if args.quick else 120.0)
    size = {"files": 2, "groups": 2} if args.quick else {"files": 8, "groups": 8}
    corpus = load_corpus(args.quick)
    corpus.copies(COPIES)
    new_words(**size)
    words_mb = DOC_BYTES * GROUP_DOCS * size["files"] * size["groups"] // MB
    settings = {
        "corpus": corpus.name,
        "seconds": seconds,
        "workers": args.workers,
        "new_words_mb": words_mb,
    }
    report = Report("memory", args.quick, settings)
    for kind in KINDS:
        case = {"kind": kind, "seconds": seconds, "workers": args.workers, **size}
        with Contender(__file__, case, args.quick) as process:
            show_run(report, kind, process.ready().measure())
    report.close()


def show_run(report: Report, kind: str, run: dict[str, Any]) -> None:
    samples = run["samples"]
    half = [(at, anonymous) for at, anonymous, *_ in samples if at >= samples[-1][0] / 2]
    level = statistics.median(anonymous for _, anonymous in half)
    slope = theil_sen(half)
    growth = 100 * slope * (half[-1][0] - half[0][0]) / level
    report.add(kind, "anonymous at the start", samples[0][1], "MB", samples=samples)
    report.add(kind, "anonymous, second half", [anonymous for _, anonymous in half], "MB")
    report.add(kind, "slope, second half", 60 * slope, "MB/min")
    report.add(kind, "growth over the second half", growth, "%", Goal("<=", FLAT_PERCENT))
    report.add(kind, "anonymous, most", max(sample[1] for sample in samples), "MB")
    report.add(kind, "resident, most", run["peak"], "MB")
    report.add(kind, "instances replaced", run["replaced"], "times")
    report.add(kind, "text streamed", run["text"], "MB")
    report.add(kind, "tokens", run["tokens"] / samples[-1][0], "M tokens/s")


if __name__ == "__main__":
    main()
