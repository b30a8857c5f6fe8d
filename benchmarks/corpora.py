"""Data for benchmarks: Parquet, JSONL, copies, a folder for the Hub, a file of token ids.

The text is books.parquet with GPT-2's vocabulary if that exists, otherwise the source code and
documentation of the standard library. Files are made once and kept in the benchmarks' folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HOSTED, SHARED, TOKENS, bench_folder


@dataclass(frozen=True)
class Corpus:
    """Text in a Parquet file (column `text`), and its vocabulary."""

    name: str
    folder: Path
    parquet: Path
    tokenizer: Path

    @property
    def jsonl(self) -> Path:
        """Return a JSONL file of the same documents in the same order."""
        path = self.folder / "text.jsonl"
        if not path.exists():
            with _complete(path) as temporary, open(temporary, "w", encoding="utf-8") as lines:
                for text in self.texts().to_pylist():
                    lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        return path

    def copies(self, n: int, kind: str = "parquet") -> Path:
        """Return a folder with N copies of the corpus, as links with different names."""
        folder = self.folder / f"{kind}-x{n}"
        if not folder.exists():
            original = self.parquet if kind == "parquet" else self.jsonl
            with _complete(folder) as temporary:
                temporary.mkdir()
                for i in range(n):
                    link(original, temporary / f"part-{i:02}.{kind}")
        return folder

    def hosted(self, compression: str, documents: int) -> Path:
        """Return a folder with one file like those of datasets on the Hub.

        Row groups of `documents`, and columns beside the text that no benchmark reads.
        """
        folder = self.folder / f"hosted-{compression}-{documents}"
        if not folder.exists():
            texts = self.texts()
            names = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(len(texts))]
            columns = {
                "text": texts,
                "id": [f"<urn:uuid:{name[:32]}>" for name in names],
                "dump": ["CC-MAIN-2026-05"] * len(texts),
                "url": [f"https://{name[:12]}.example.org/{name[12:40]}" for name in names],
            }
            with _complete(folder) as temporary:
                temporary.mkdir()
                write_parquet(temporary / HOSTED, columns, documents, compression)
        return folder

    def texts(self) -> Any:
        """Return all documents as one large_string array."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        column = pq.read_table(self.parquet, columns=["text"]).column("text")
        return pa.concat_arrays(column.cast(pa.large_string()).chunks)


def load_corpus(
    quick: bool = False, data: Path | None = None, tokenizer: Path | None = None
) -> Corpus:
    """Return the corpus. `quick`: only a few megabytes. `data`, `tokenizer`: other files."""
    data = data or SHARED / "books.parquet"
    if data.is_file():
        folder = bench_folder(f"{data.stem}-{data.stat().st_size}")
        path = folder / "text.parquet"
        if not path.exists():
            with _complete(path) as temporary:
                shutil.copyfile(data, temporary)
        full = Corpus(data.stem, folder, path, tokenizer or data.parent / "gpt2-tokenizer.json")
    else:
        full = _standard_library()
    if not quick:
        return full
    folder = full.folder / "quick"
    folder.mkdir(exist_ok=True)
    path = folder / "text.parquet"
    if not path.exists():
        import pyarrow.parquet as pq

        texts = pq.ParquetFile(full.parquet).read_row_group(0, columns=["text"])["text"]
        with _complete(path) as temporary:
            write_parquet(temporary, {"text": texts}, max(1, len(texts) // 4))
    return Corpus(f"{full.name}, first row group", folder, path, full.tokenizer)


def _standard_library() -> Corpus:
    folder = bench_folder(f"stdlib-{platform.python_version()}")
    path, vocabulary = folder / "text.parquet", folder / "tokenizer.json"
    if not (path.exists() and vocabulary.exists()):
        texts = list(_own_texts())
        with _complete(path) as temporary:
            write_parquet(temporary, {"text": texts}, max(1, len(texts) // 8))
        _train(texts[::4], vocabulary)
    return Corpus("stdlib", folder, path, vocabulary)


def _own_texts() -> Iterator[str]:
    from pydoc_data import topics

    yield from (text for _, text in sorted(topics.topics.items()) if text)
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        # The standard library's tests include files that are deliberately not UTF-8.
        if text := file.read_text("utf-8", errors="replace"):
            yield text


def _train(texts: list[str], path: Path) -> None:
    """Train a byte-level BPE of 16,384 tokens in a few seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    with _complete(path) as temporary:
        tokenizer.save(str(temporary))


def write_parquet(
    path: Path, columns: dict[str, Any], rows: int, compression: str = "zstd"
) -> None:
    """Write a file with row groups of `rows` documents."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=rows, compression=compression)


def token_file(batches: int) -> Path:
    """Return a file of random uint16 ids whose rows fill this many batches."""
    import numpy as np

    ids = batches * TOKENS + 1
    path = bench_folder("tokens") / f"random-{ids}.bin"
    if not path.exists():
        with _complete(path) as temporary:
            np.random.default_rng(0).integers(0, 50257, ids, np.uint16).tofile(temporary)
    return path


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file or folder; rename it when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        if not path.is_dir():  # another process may have created the same folder
            os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def link(original: Path, copy: Path) -> None:
    """Link a file under another name; copy it if links are not possible."""
    try:
        os.link(original, copy)
    except OSError:
        shutil.copyfile(original, copy)
