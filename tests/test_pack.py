"""Packing, against the plainest way to do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.encode.deal import Batcher
from penstock.encode.pack import make_packer

from penstock.encode import stream
from penstock.encode.best_fit import best_fit
from penstock.encode.rows import Mark, Packer
from penstock.encode.window import Place, Window
from penstock.order.shuffle import permutation
from penstock.types import ChunkRef, FileRef, Packing, Shard, TokenChunk

EOS = 0
DTYPE = np.dtype(np.uint16)
FILE = FileRef("f.parquet", "f.parquet", 1, "parquet")

# Windows of documents of ids; a document's last id is its separator, an empty one has none.
windows_of = st.lists(
    st.lists(st.integers(0, 30).map(lambda n: [*range(1, n + 1), EOS] if n else []), max_size=12),
    min_size=1,
    max_size=5,
)


def chunk(index: int, documents: Sequence[Sequence[int]]) -> TokenChunk:
    docs = pa.array([np.array(d, DTYPE).tobytes() for d in documents], pa.large_binary())
    return TokenChunk(ChunkRef(FILE, index, 1), docs, np.arange(len(documents)), False, [], 0, 1)


def windows(
    documents: list[list[list[int]]], start: int = 0, shuffle: bool = False
) -> list[Window]:
    out = []
    for i, of_window in enumerate(documents[start:], start):
        order = permutation(len(of_window), i) if shuffle else None
        out.append(Window(Place(chunk=i, window=i), [chunk(i, of_window)], order, DTYPE))
    return out


@given(windows_of, st.integers(0, 9), st.data())
def test_a_window_of_several_chunks_gives_its_documents_in_their_order(
    chunks: list[list[list[int]]], seed: int, data: st.DataObject
) -> None:
    documents = [document for of_chunk in chunks for document in of_chunk]
    order = permutation(len(documents), seed) if seed else None
    window = Window(
        Place(), [chunk(i, of_chunk) for i, of_chunk in enumerate(chunks)], order, DTYPE
    )
    expected = documents if order is None else [documents[k] for k in order.tolist()]
    first = data.draw(st.integers(0, len(documents)))
    last = data.draw(st.integers(first, len(documents)))
    assert window.gather(first, last).tolist() == [
        id for document in expected[first:last] for id in document
    ]
    assert np.diff(window.map.ends, prepend=0).tolist() == [len(document) for document in expected]


def packer(
    packing: Packing,
    documents: list[list[list[int]]],
    seq_len: int,
    place: Place | None = None,
    shuffle: bool = False,
) -> Packer:
    place = place or Place()
    source = iter(windows(documents, place.chunk, shuffle))
    return make_packer(
        packing, lambda: next(source, None), place, seq_len, 7, DTYPE, keep_tail=True, track=True
    )


def drain(packer: Packer, n: int = 3) -> list[tuple[list[int], int]]:
    """All rows of a packer, with the number of real ids in each."""
    out = []
    while rows := packer.rows(n):
        for part in rows:
            for i, ids in enumerate(part.ids.tolist()):
                out.append((ids, len(ids) if part.valid is None else int(part.valid[i])))
    return out


def in_order(documents: list[list[list[int]]], shuffle: bool) -> list[list[int]]:
    out = []
    for i, of_window in enumerate(documents):
        order = permutation(len(of_window), i).tolist() if shuffle else range(len(of_window))
        out += [of_window[k] for k in order if of_window[k]]
    return out


@given(documents=windows_of, seq_len=st.integers(1, 40), n=st.integers(1, 9), shuffle=st.booleans())
def test_concat_rows_are_the_stream_cut_with_one_id_of_overlap(
    documents: list[list[list[int]]], seq_len: int, n: int, shuffle: bool
) -> None:
    stream = [id for document in in_order(documents, shuffle) for id in document]
    expected = []
    for at in range(0, max(0, len(stream) - 1), seq_len):
        ids = stream[at : at + seq_len + 1]
        expected.append((ids + [7] * (seq_len + 1 - len(ids)), len(ids)))
    assert drain(packer("concat", documents, seq_len, shuffle=shuffle), n) == expected


@given(documents=windows_of, seq_len=st.integers(1, 40), n=st.integers(1, 9), shuffle=st.booleans())
def test_bos_rows_begin_with_documents_and_crop_only_at_their_end(
    documents: list[list[list[int]]], seq_len: int, n: int, shuffle: bool
) -> None:
    ordered = in_order(documents, shuffle)
    stream = [id for document in ordered for id in document]
    begins = np.cumsum([0, *(len(d) for d in ordered)]).tolist()
    expected, cropped, at = [], 0, 0
    while at + 1 < len(stream):
        ids = stream[at : at + seq_len + 1]
        expected.append((ids + [7] * (seq_len + 1 - len(ids)), len(ids)))
        after = next(b for b in [*begins, len(stream)] if b >= min(at + seq_len, len(stream)))
        if len(ids) == seq_len + 1:
            cropped += max(0, after - at - seq_len - 1)
            at = after
        else:
            at = len(stream)
    p = packer("bos", documents, seq_len, shuffle=shuffle)
    assert drain(p, n) == expected
    assert p.counts.cropped_tokens == cropped


@given(documents=windows_of, seq_len=st.integers(1, 40), n=st.integers(1, 9), shuffle=st.booleans())
def test_best_fit_cuts_only_documents_longer_than_a_row_and_loses_nothing(
    documents: list[list[list[int]]], seq_len: int, n: int, shuffle: bool
) -> None:
    ordered = in_order(documents, shuffle)
    p = packer("best_fit", documents, seq_len, shuffle=shuffle)
    rows = drain(p, n)
    assert all(ids[real:] == [7] * (seq_len + 1 - real) for ids, real in rows)
    pieces: list[list[int]] = []
    for ids, real in rows:
        at = 0
        while at < real:
            end = ids.index(EOS, at, real) + 1 if EOS in ids[at:real] else real
            pieces.append(ids[at:end])
            at = end
    whole = sorted(d for d in ordered if len(d) <= seq_len + 1)
    for document in whole:
        assert document in pieces
    tokens = sum(len(d) for d in ordered)
    overlap = sum((len(d) - 2) // seq_len for d in ordered if len(d) > seq_len + 1)
    assert sum(real for _, real in rows) == tokens + overlap
    assert p.counts.padded_tokens == sum(seq_len + 1 - real for _, real in rows)


@pytest.mark.parametrize("packing", ["concat", "bos", "best_fit"])
@given(
    documents=windows_of, seq_len=st.integers(1, 40), at=st.integers(0, 20), shuffle=st.booleans()
)
def test_a_packer_continues_at_any_row_from_its_place(
    packing: Packing, documents: list[list[list[int]]], seq_len: int, at: int, shuffle: bool
) -> None:
    whole = drain(packer(packing, documents, seq_len, shuffle=shuffle), 1)
    first = packer(packing, documents, seq_len, shuffle=shuffle)
    for _ in range(min(at, len(whole))):
        first.rows(1)
    mark = first.mark()
    place = mark.place() if isinstance(mark, Mark) else mark
    assert drain(packer(packing, documents, seq_len, place, shuffle), 4) == whole[at:]


@pytest.mark.parametrize("packing", ["concat", "bos", "best_fit"])
@given(documents=windows_of, seq_len=st.integers(1, 10), n=st.integers(1, 9))
def test_rows_that_a_packer_says_it_holds_need_no_further_window(
    packing: Packing, documents: list[list[list[int]]], seq_len: int, n: int
) -> None:
    source, asked = iter(windows(documents)), 0

    def next_window() -> Window | None:
        nonlocal asked
        asked += 1
        return next(source, None)

    rows = make_packer(
        packing, next_window, Place(), seq_len, 7, DTYPE, keep_tail=True, track=False
    )
    given = -1
    while given:
        held, before = rows.holds(n), asked
        given = sum(len(part.ids) for part in rows.rows(n))
        assert not held or (given == n and asked == before)


def test_a_packer_holds_what_is_left_of_its_window() -> None:
    window = [[list(range(1, 101)), list(range(1, 101))]]
    stream, fitted = packer("concat", window, 10), packer("best_fit", window, 9)
    for rows in (stream, fitted):
        assert not rows.holds(1), "nothing has been asked for yet"
        rows.rows(1)
        assert rows.holds(5)
        assert not rows.holds(100)
    assert stream.holds(18)
    assert not stream.holds(19), "that takes 191 ids, and 190 are left"


@pytest.mark.parametrize("packing", ["concat", "bos", "best_fit"])
@given(documents=windows_of, seq_len=st.integers(1, 10), n=st.integers(1, 9), shuffle=st.booleans())
def test_rows_that_are_at_hand_come_as_they_are(
    packing: Packing, documents: list[list[list[int]]], seq_len: int, n: int, shuffle: bool
) -> None:
    rows = packer(packing, documents, seq_len, shuffle=shuffle)
    given: list[list[int]] = []
    while True:
        at_hand = min(n, rows.at_hand())
        parts = rows.rows(at_hand or 1)
        given += [ids for part in parts for ids in part.ids.tolist()]
        if at_hand:
            assert packing == "concat"
            assert [(len(part.ids), part.valid) for part in parts] == [(at_hand, None)]
        elif not parts:
            break
    assert given == [ids for ids, _ in drain(packer(packing, documents, seq_len, shuffle=shuffle))]


@given(lengths=st.lists(st.integers(1, 50), max_size=200))
def test_best_fit_never_overfills_and_leaves_no_two_rows_that_fit_together(
    lengths: list[int],
) -> None:
    rows, columns = best_fit(np.array(lengths, np.int64), 50)
    used: dict[int, int] = {}
    for length, row, column in sorted(
        zip(lengths, rows.tolist(), columns.tolist(), strict=True), key=lambda x: x[1:]
    ):
        assert column == used.get(row, 0)
        used[row] = column + length
    assert all(n <= 50 for n in used.values())
    assert sorted(used) == list(range(len(used)))
    assert sum(50 - n >= 25 for n in used.values()) <= 1


@given(documents=windows_of, seq_len=st.integers(1, 20))
@pytest.mark.parametrize("packing", ["concat", "bos", "best_fit"])
def test_positions_count_from_each_document_or_row_start(
    packing: Packing, documents: list[list[list[int]]], seq_len: int
) -> None:
    batcher = Batcher(
        [packer(packing, documents, seq_len)], shard=Shard(1, 0), lanes=1, batch_size=3, seq_len=seq_len,
        drop_last=False, extras=True, tensors=False, most=2, row=0, batch=0, state=lambda position: {},
    )  # fmt: skip
    while batches := batcher.next():
        for batch in batches:
            flat = batch.inputs.reshape(-1).tolist()
            expected, count = [], 0
            spans = batch.provenance()
            begins = {(r, s.at[0]) for r, row in enumerate(spans) for s in row}
            ends = {(r, row[-1].at[1]) for r, row in enumerate(spans) if row}
            for i in range(len(flat)):
                r, c = divmod(i, seq_len)
                count = 0 if c == 0 or (r, c) in begins or (r, c) in ends else count + 1
                expected.append(count)
            assert batch.positions.reshape(-1).tolist() == expected
            bounds = batch.cu_seqlens.tolist()
            assert bounds == [i for i, p in enumerate(expected) if p == 0] + [len(flat)]
            assert batch.cu_seqlens.dtype == np.int32


@given(documents=windows_of, seq_len=st.integers(1, 20), shuffle=st.booleans())
@pytest.mark.parametrize("packing", ["concat", "bos", "best_fit"])
def test_provenance_leads_back_to_every_id(
    packing: Packing, documents: list[list[list[int]]], seq_len: int, shuffle: bool
) -> None:
    p = packer(packing, documents, seq_len, shuffle=shuffle)
    while rows := p.rows(2):
        for part in rows:
            for i, ids in enumerate(part.ids.tolist()):
                real = len(ids) if part.valid is None else int(part.valid[i])
                found: list[int] = []
                for span in part.spans(i):
                    assert span.at == (len(found), len(found) + span.tokens[1] - span.tokens[0])
                    assert span.row_group is not None
                    found += documents[span.row_group][span.row][slice(*span.tokens)]
                assert found == ids[:real]


def test_a_long_piece_is_not_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[[*range(1, 5000), EOS]], [[*range(1, 3000), EOS]]]
    whole = drain(packer("concat", documents, 64), 2)
    monkeypatch.setattr(stream, "GATHER_TOKENS", 10)
    assert drain(packer("concat", documents, 64), 2) == whole


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("good", range(1, 9))
def test_no_row_is_dealt_after_the_one_that_a_lane_failed_at(good: int, size: int) -> None:
    def lane(name: int, rows: int, fails: bool) -> Packer:
        source = iter(windows([[[10 * name + i, 10 * name + i]] for i in range(rows)]))

        def next_window() -> Window | None:
            window = next(source, None)
            if window is None and fails:
                raise ValueError("broken")
            return window

        return make_packer("bos", next_window, Place(), 1, 7, DTYPE, keep_tail=True, track=True)

    batcher = Batcher(
        [lane(1, 1, False), lane(2, 9, False), lane(3, good, True)], shard=Shard(1, 0), lanes=3, batch_size=size, seq_len=1,
        drop_last=False, extras=False, tensors=False, most=1, row=0, batch=0, state=lambda position: {},
    )  # fmt: skip
    dealt: list[int] = []

    def deal() -> None:
        while batches := batcher.next():
            dealt.extend(int(row[0]) for batch in batches for row in batch.inputs)

    with pytest.raises(ValueError, match="broken"):
        deal()
    turns = [10 * lane + turn for turn in range(9) for lane in (1, 2, 3) if lane != 1 or turn == 0]
    before = turns[: turns.index(30 + good - 1) + 2]  # the row of another lane may come between
    assert dealt == before[: len(dealt)]
    assert len(dealt) > len(before) - 1 - size
