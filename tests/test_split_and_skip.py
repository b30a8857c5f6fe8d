"""Which documents belong to a split, and leaving single documents out: by address, whatever else there is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import ConfigError, Span, TextDataset
from penstock.errors import SourceError
from tests.reading import bytes_of, documents, ids_of, open_loader, split_ids, write_jsonl

TEXTS = [f"document {i} " + "é" * (i * 7 % 30) for i in range(240)]
WANTED = [text.encode() for text in TEXTS]


def write(folder: Path, source: str) -> None:
    """Write the texts in one of five formats."""
    if source == "bundle":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:03}.txt").write_bytes(text.encode())
    elif source == "text":
        (folder / "a.txt").write_bytes("\n\n".join(TEXTS).encode())
    elif source == "gz":
        lines = write_jsonl(folder / "a.jsonl", TEXTS).read_bytes()
        (folder / "a.jsonl").unlink()
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    else:
        for name, part in (("a", TEXTS[:150]), ("b", TEXTS[150:])):
            if source == "jsonl":
                write_jsonl(folder / f"{name}.jsonl", part)
            else:
                table = pa.table({"text": part})
                pq.write_table(table, folder / f"{name}.parquet", row_group_size=64)


each_source = pytest.mark.parametrize("source", ["parquet", "jsonl", "gz", "text", "bundle"])


def again(folder: Path, source: str, **settings: Any) -> TextDataset:
    """The dataset of a source that has been written, with other settings."""
    how: dict[str, Any] = {"chunk_bytes": 1024, "separator": "\n\n" if source == "text" else None}
    return bytes_of(folder, **(how | settings))


def split(folder: Path, source: str, name: str, **settings: Any) -> list[bytes]:
    return documents(again(folder, source, **{"split": f"{name}:0.2", **settings}))


# Splits


@each_source
def test_train_and_val_are_disjoint_and_together_complete(tmp_path: Path, source: str) -> None:
    write(tmp_path, source)
    train, val = (split(tmp_path, source, name) for name in ("train", "val"))
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(WANTED)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
def test_the_fraction_is_about_what_was_asked_for(tmp_path: Path, fraction: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(20_000)])
    val = documents(bytes_of(path, split=f"val:{fraction}", seq_len=4096))
    # Five standard deviations of a fair draw.
    assert abs(len(val) - 20_000 * fraction) < 5 * (20_000 * fraction * (1 - fraction)) ** 0.5


@pytest.mark.parametrize("source", ["jsonl", "text", "gz"])
@pytest.mark.parametrize("chunk_bytes", [1024, 1531, 1 << 20])
def test_a_split_does_not_depend_on_chunk_bytes(
    tmp_path: Path, source: str, chunk_bytes: int
) -> None:
    write(tmp_path, source)
    assert split(tmp_path, source, "val", chunk_bytes=chunk_bytes) == split(
        tmp_path, source, "val", chunk_bytes=4096
    )


@each_source
def test_a_split_stays_as_it_was_when_files_are_added(tmp_path: Path, source: str) -> None:
    write(tmp_path, source)
    before = split(tmp_path, source, "val")
    for name in ("0", "aa", "zz"):  # before, between and after those that were there
        new = [f"new {name} {i}" for i in range(20)]
        if source == "parquet":
            pq.write_table(pa.table({"text": new}), tmp_path / f"{name}.parquet")
        elif source in ("jsonl", "gz"):
            write_jsonl(tmp_path / f"{name}.jsonl", new)
        else:
            (tmp_path / f"{name}.txt").write_text(f"new {name}")
    after = split(tmp_path, source, "val")
    assert [text for text in after if not text.startswith(b"new")] == before


def test_documents_of_a_split_name_their_true_rows(tmp_path: Path) -> None:
    write(tmp_path, "parquet")
    with open_loader(again(tmp_path, "parquet", split="val:0.2")) as loader:
        spans = [span for batch in loader for row in batch.provenance() for span in row]
    groups = {name: pq.ParquetFile(tmp_path / name) for name in ("a.parquet", "b.parquet")}
    named = dict.fromkeys(
        groups[s.file].read_row_group(s.row_group or 0).column("text")[s.row].as_py().encode()
        for s in spans
    )
    assert list(named) == split(tmp_path, "parquet", "val")


def test_a_split_without_documents_or_sense_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["only one"])
    with pytest.raises(SourceError, match="empty or left out"):
        documents(bytes_of(path, split="val:1e-9"))
    for wrong in ("test", "val:0.0", "val:1.0"):
        with pytest.raises(ConfigError, match="split"):
            bytes_of(path, split=wrong)


# Skipping


def written(folder: Path, source: str) -> dict[bytes, Span]:
    """Write the texts, and return a span of each; without shuffling they come in their order."""
    write(folder, source)
    with open_loader(again(folder, source)) as loader:
        spans = [span for batch in loader for row in batch.provenance() for span in row]
    first = list(dict.fromkeys(span.address for span in spans))
    by_address = {span.address: span for span in reversed(spans)}
    return dict(zip(WANTED, (by_address[address] for address in first), strict=True))


CHOSEN = (0, 1, 77, 149, 150, 200, 239)
KEPT = [text for i, text in enumerate(WANTED) if i not in CHOSEN]


FORMS: dict[str, Callable[[Span], Any]] = {
    "span": lambda span: span,
    "tuple": lambda span: tuple(span.address),
    "json": lambda span: json.loads(json.dumps(span.address)),
}


@each_source
@pytest.mark.parametrize("form", FORMS)
def test_skip_leaves_exactly_these_documents_out_and_keeps_the_order(
    tmp_path: Path, source: str, form: str
) -> None:
    spans = written(tmp_path, source)
    skip = [FORMS[form](spans[WANTED[i]]) for i in CHOSEN]
    assert documents(again(tmp_path, source, skip=skip)) == KEPT
    whole = documents(again(tmp_path, source), shuffle=True, seed=3)
    got = documents(again(tmp_path, source, skip=skip), shuffle=True, seed=3)
    assert got == [text for text in whole if text in set(KEPT)] != KEPT


@pytest.mark.parametrize(
    "entry", ["a.jsonl", ("a.jsonl", 1), ("a.jsonl", None, -1), (1, None, 0), ("a", "b", 0), 7]
)
def test_what_is_no_address_is_refused(tmp_path: Path, entry: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ConfigError, match="must be spans, or addresses of documents"):
        bytes_of(path, skip=[entry])


def test_an_address_in_an_unknown_file_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ConfigError, match="'other' is not one of"):
        bytes_of(path, skip=[("other", None, 0)])


# Skipping and state


def batches(
    dataset: TextDataset, state: Any = None, most: int = 10**9, **how: Any
) -> tuple[list[Any], Any]:
    """Up to `most` batches from a state on, and the state after them, through JSON as in a checkpoint."""
    with open_loader(dataset, **how) as loader:
        if state is not None:
            loader.load_state_dict(state)
        got = []
        while len(got) < most and (batch := loader.next_batch()) is not None:
            got.append(batch)
        return got, json.loads(json.dumps(loader.state_dict()))


@each_source
@pytest.mark.parametrize("shuffle", [False, True])
def test_skip_stays_part_of_the_state(tmp_path: Path, source: str, shuffle: bool) -> None:
    spans = written(tmp_path, source)
    skip = [spans[WANTED[i]] for i in CHOSEN]
    whole, _ = batches(again(tmp_path, source, skip=skip), shuffle=shuffle)
    head, state = batches(again(tmp_path, source, skip=skip), most=3, shuffle=shuffle)
    # The run is continued by somebody who does not name what is to be skipped.
    tail, _ = batches(again(tmp_path, source), state, shuffle=shuffle)
    assert ids_of([*head, *tail]).tolist() == ids_of(whole).tolist()


@each_source
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_document_still_to_come_can_be_skipped_at_a_resume(
    tmp_path: Path, source: str, shuffle: bool
) -> None:
    spans = written(tmp_path, source)
    whole = documents(again(tmp_path, source), shuffle=shuffle)
    head, state = batches(again(tmp_path, source), most=5, shuffle=shuffle)
    tail, _ = batches(again(tmp_path, source, skip=[spans[whole[-2]]]), state, shuffle=shuffle)
    assert split_ids(ids_of([*head, *tail])) == [*whole[:-2], whole[-1]]
