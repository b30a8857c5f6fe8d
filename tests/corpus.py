"""Small real files for tests: the same documents in every format, and a vocabulary for them."""

from __future__ import annotations

import gzip
import json
import pydoc_data.topics
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@cache
def texts() -> tuple[str, ...]:
    """Documents of many lengths: single characters, lines, pages, and one far longer than any row."""
    pages = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    rng = random.Random(7)
    out = ["x", "é", "Привет, мир! 你好 🙂", "", "a", "two\nlines"]
    for page in pages[:40]:
        at = rng.randrange(len(page))
        out += [page[at : at + rng.choice([3, 40, 200, 900])], page[: rng.choice([100, 500, 1500])]]
    out.append("long " * 2500)
    rng.shuffle(out)
    return tuple(out)


def write_corpus(folder: Path) -> None:
    """The documents as Parquet (several row groups), JSONL, compressed JSONL and separated text."""
    documents = list(texts())
    half = len(documents) // 2
    (folder / "parquet").mkdir()
    for name, part in (("a", documents[:half]), ("b", documents[half:])):
        table = pa.table({"id": range(len(part)), "text": part})
        pq.write_table(table, folder / "parquet" / f"{name}.parquet", row_group_size=7)
    lines = "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(documents))
    (folder / "docs.jsonl").write_text(lines)
    (folder / "docs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "docs.txt").write_bytes("\0\0".join(documents).encode())
    (folder / "many").mkdir()
    for i in range(24):
        part = documents[i::24]
        pq.write_table(
            pa.table({"text": part}), folder / "many" / f"{i:03}.parquet", row_group_size=2
        )
    train_vocabulary(folder / "tokenizer.json")


def train_vocabulary(
    path: Path, size: int = 400, of: Sequence[str] = (), specials: Sequence[str] = ()
) -> Path:
    """Train a small byte-level BPE in the style of GPT-2, on the corpus or other texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(of or texts(), trainer)
    tokenizer.save(str(path))
    return path
