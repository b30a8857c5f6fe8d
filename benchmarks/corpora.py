"""The text that is measured with, in every form that a script wants.

In:    books.parquet and a vocabulary, or where there are none the standard library's own text.
Out:   a `Corpus`: Parquet, JSONL, many copies of it.
Where: before any clock starts.
State: files in the benchmarks' folder, each made once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HOSTED, SHARED, Kind, bench_folder


@dataclass(frozen=True)
class Corpus:
    """Some text as Parquet (columns source, path, text) and the vocabulary that encodes it."""

    name: str
    folder: Path
    parquet: Path
    tokenizer: Path

    @property
    def jsonl(self) -> Path:
        """The same documents in the same order, as JSONL."""
        path = self.folder / "text.jsonl"
        if not path.exists():
            import pyarrow.parquet as pq

            file = pq.ParquetFile(self.parquet)
            with _made(path) as temporary, open(temporary, "w", encoding="utf-8") as lines:
                for i in range(file.num_row_groups):
                    for row in file.read_row_group(i).to_pylist():
                        lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        return path

    def copies(self, n: int, kind: Kind = "parquet") -> Path:
        """A folder with the corpus `n` times under different names. Links: no further space on disk or in its cache."""
        folder = self.folder / f"{kind}-x{n}"
        if not folder.exists():
            original = self.parquet if kind == "parquet" else self.jsonl
            with _made(folder) as temporary:
                temporary.mkdir()
                for i in range(n):
                    link(original, temporary / f"part-{i:02}.{kind}")
        return folder

    def hosted(self, compression: str, documents: int) -> Path:
        """A folder with the corpus as one file of the kind that is on the Hub: row groups of so many documents, and
        columns beside the text that nobody has asked for."""
        folder = self.folder / f"hosted-{compression}-{documents}"
        if not folder.exists():
            import pyarrow as pa
            import pyarrow.parquet as pq

            text = pq.read_table(self.parquet, columns=["text"]).column("text")
            names = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(len(text))]
            columns = {
                "text": text,
                "id": [f"<urn:uuid:{name[:32]}>" for name in names],
                "dump": ["CC-MAIN-2026-05"] * len(text),
                "url": [f"https://{name[:12]}.example.org/{name[12:40]}" for name in names],
                "score": [int(name[:4], 16) / 13107 for name in names],
            }
            with _made(folder) as temporary:
                temporary.mkdir()
                path = temporary / HOSTED
                pq.write_table(
                    pa.table(columns), path, row_group_size=documents, compression=compression
                )
        return folder

    def texts(self) -> Any:
        """All documents as one large_string array."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        column = pq.read_table(self.parquet, columns=["text"]).column("text")
        return pa.concat_arrays(column.cast(pa.large_string()).chunks)


def load_corpus(quick: bool = False) -> Corpus:
    """The corpus, made and kept on disk at the first call. `quick` gives a few megabytes of it."""
    full = _books() if (SHARED / "books.parquet").is_file() else _standard_library()
    if not quick:
        return full
    folder = full.folder / "quick"
    folder.mkdir(exist_ok=True)
    path = folder / "text.parquet"
    if not path.exists():
        import pyarrow.parquet as pq

        table = pq.ParquetFile(full.parquet).read_row_group(0)
        with _made(path) as temporary:
            pq.write_table(
                table, temporary, row_group_size=max(1, len(table) // 4), compression="zstd"
            )
    return Corpus(f"{full.name}, first row group", folder, path, full.tokenizer)


def _books() -> Corpus:
    source = SHARED / "books.parquet"
    folder = bench_folder(f"books-{source.stat().st_size}")
    path = folder / "text.parquet"
    if not path.exists():
        with _made(path) as temporary:
            shutil.copyfile(source, temporary)  # what lies beside the corpus is not ours to link to
    return Corpus("books", folder, path, SHARED / "gpt2-tokenizer.json")


def _standard_library() -> Corpus:
    folder = bench_folder(f"stdlib-{platform.python_version()}")
    path, vocabulary = folder / "text.parquet", folder / "tokenizer.json"
    if not (path.exists() and vocabulary.exists()):
        texts = list(_own_texts())
        _write_texts(texts, path)
        _train(texts, vocabulary)
    return Corpus("stdlib", folder, path, vocabulary)


def _own_texts() -> Iterator[tuple[str, str]]:
    """The interpreter's documentation topics and its own source code."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield f"topics/{name}", text
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the test suite has files that are broken on purpose
        if text:
            yield str(file.relative_to(root)), text


def _write_texts(texts: Sequence[tuple[str, str]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names, bodies = zip(*texts, strict=True)
    table = pa.table({"source": ["stdlib"] * len(names), "path": names, "text": bodies})
    with _made(path) as temporary:
        pq.write_table(table, temporary, row_group_size=max(1, len(texts) // 8), compression="zstd")


def _train(texts: Sequence[tuple[str, str]], path: Path) -> None:
    """A byte-level BPE of 16,384 tokens from every fourth document: GPT-2's kind, seconds to make."""
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
    tokenizer.train_from_iterator((text for _, text in texts[::4]), trainer)
    with _made(path) as temporary:
        tokenizer.save(str(temporary))


@contextmanager
def _made(path: Path) -> Iterator[Path]:
    """A name to make a file or folder under; it gets its own once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        try:
            os.replace(temporary, path)
        except OSError:
            if not path.is_dir():  # a folder that somebody else has made meanwhile is as good
                raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def link(original: Path, copy: Path) -> None:
    """Another name for a file, which counts as a file of its own; a copy where there are no such names."""
    try:
        os.link(original, copy)
    except OSError:
        shutil.copyfile(original, copy)


def text_ranges(path: Path) -> list[tuple[int, int]]:
    """Where the text of each row group of a Parquet file lies: start and length, by its footer."""
    import pyarrow.parquet as pq

    footer = pq.read_metadata(path)
    ranges = []
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        text = next(
            c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "text"
        )
        start = text.data_page_offset
        if text.has_dictionary_page and text.dictionary_page_offset:
            start = min(start, text.dictionary_page_offset)
        ranges.append((start, text.total_compressed_size))
    return ranges
