"""Measure how well a batch is mixed: distinct source chunks, as a share of those in a uniform
order.

A corpus of 2,000 chunks of 1,000 short documents. Batches have 16, 64 or 256 rows of 192 tokens,
about 26, 100 or 400 documents, all in one lane. The result is the mean of one epoch, from
provenance (for `datasets`, from its documents, cut into batches of the same size). The chunks are
the source's row groups. Prints Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import common
from corpora import write_parquet
from penstock import AsyncDataLoader, PreparedDataset, TextDataset
from penstock.prepare import prepare
from report import Goal, Report, print_markdown, show

SEQ_LEN, FILES, GROUP = 192, 20, 1000
EVERY = 40
"""Only every n-th batch is examined."""


def make_corpus(chunks: int) -> Any:
    """Write Parquet files with row groups of 1,000 documents, about 125 bytes each."""
    folder = common.bench_folder(f"shuffle-{chunks}")
    rng = np.random.default_rng(0)
    letters = "".join(map(chr, rng.integers(97, 123, 1 << 16))) * 2
    for number in range(FILES):
        path = folder / f"{number:02}.parquet"
        if not path.exists():
            n = chunks // FILES * GROUP
            lengths = np.clip(rng.lognormal(np.log(75), 1.0, n), 8, 4000).astype(int).tolist()
            texts = [letters[i % 60_000 :][:length] for i, length in enumerate(lengths)]
            groups = number * chunks // FILES + np.arange(n) // GROUP
            write_parquet(
                path.with_suffix(".made"), {"text": texts, "chunk": pa.array(groups)}, GROUP
            )
            path.with_suffix(".made").rename(path)
    return folder


def of_loader(data: Any, batch_size: int) -> Iterator[list[Any]]:
    """Yield the chunk of each document in the examined batches."""
    with AsyncDataLoader(data, batch_size, shuffle=True, epochs=1, lanes=1, seed=3) as loader:
        for number, batch in enumerate(loader):
            if number % EVERY == 0:
                documents = {
                    (s.file, s.row_group, s.row) for row in batch.provenance() for s in row
                }
                yield [document[:2] for document in documents]


def of_datasets(folder: Any, buffer: int, documents: int) -> Iterator[list[Any]]:
    """Yield the same for `datasets`, streamed and shuffled, once its buffer is full."""
    from datasets import load_dataset

    files = sorted(map(str, folder.glob("*.parquet")))
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
    batches = rows.select_columns(["chunk"]).shuffle(seed=3, buffer_size=buffer).batch(documents)
    for number, batch in enumerate(batches):
        if number % EVERY == 0:
            yield batch["chunk"]
        if number * documents > 100_000:
            return


def quality(batches: Iterator[list[Any]], chunks: int) -> float:
    """Return the mean share of the chunks in a uniform order of as many documents."""
    return statistics.fmean(
        len(set(batch)) / (chunks * (1 - (1 - 1 / chunks) ** len(batch))) for batch in batches
    )


def main() -> None:
    args = common.parser(__doc__).parse_args()
    common.silence_warnings()
    chunks = 40 if args.quick else 2000
    folder = make_corpus(chunks)
    out = common.bench_folder(f"shuffle-{chunks}-prepared")
    prepare(folder, tokenizer="byte", out=out)

    def text(window: int) -> TextDataset:
        options: Any = {"shuffle_chunks": window, "cache": False}
        return TextDataset(folder, tokenizer="byte", seq_len=SEQ_LEN, **options)

    orders: dict[str, tuple[Any, int]]
    orders = {f"datasets, buffer of {n:,}": (None, n) for n in (1_000, 10_000)}
    orders |= {f"text, windows of {n} chunks": (text, n) for n in (16, 32, 64, 256)}
    orders["PreparedDataset"] = (lambda _: PreparedDataset(out, seq_len=SEQ_LEN), 0)
    report, rows = Report("shuffle", args.quick, {"chunks": chunks}), []
    for name, (make, size) in orders.items():
        cells = []
        for batch_size, documents in ((16, 26), (64, 100), (256, 400)):
            given = of_datasets(folder, size, documents)
            if make is not None:
                given = of_loader(make(size), batch_size)
            goal = Goal(">=", 0.95) if name == "PreparedDataset" else None
            value = report.add(name, f"{batch_size} rows", quality(given, chunks), "x", goal)
            cells.append(show(value))
        rows.append([name, *cells])
    print_markdown(["order", "about 26 documents a batch", "about 100", "about 400"], rows)


if __name__ == "__main__":
    main()
