"""Read plain text: documents between separators, or whole files.

In:    the records of a byte range, or a bundle of small files.
Out:   their texts; the address is the byte offset, or in a bundle the file's number.
Where: worker threads.
State: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from penstock.read.columns import binaries, integers, nothing
from penstock.read.delimited import Records
from penstock.read.records import Judge, clean, reject_cut
from penstock.read.storage import AnyFile, PlainFile
from penstock.types import Address, ChunkRef, Documents, FileRef, MiB


def split(file: FileRef, records: Records, judge: Judge) -> Documents:
    """The texts between separators."""
    starts, ends = records.starts, records.ends
    if records.cut:
        starts, ends = starts[:-1], ends[:-1]
    # Text and separator alternate, so every other value between these offsets is a text.
    offsets = np.empty(2 * len(starts), np.int64)
    offsets[0::2], offsets[1::2] = starts, ends
    rows = starts + records.offset
    column = nothing(pa.large_binary())
    if len(starts):
        alternating = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            len(offsets) - 1,
            [None, pa.py_buffer(offsets), pa.py_buffer(records.buffer)],
        )
        column = alternating.take(integers(np.arange(0, len(offsets) - 1, 2)))
    documents = clean(column, rows, lambda i: Address(file.name, None, int(rows[i])), judge)
    if records.cut:
        reject_cut(file, records, judge)
    return documents


def whole(file: FileRef, source: AnyFile, judge: Judge) -> Documents:
    """A file that is one document, read no further than is allowed."""
    parts: list[bytes] = []
    have = 0
    while have <= judge.max_doc_bytes:
        part = source.read(have, 16 * MiB)
        parts.append(part)
        have += len(part)
        if len(part) < 16 * MiB:
            break
    column = binaries([b"".join(parts)])
    documents = clean(column, np.zeros(1, np.int64), lambda i: Address(file.name, None, 0), judge)
    documents.last = True
    return documents


def bundled(ref: ChunkRef) -> tuple[int, list[FileRef]]:
    """The files of a bundle, or of a part of one, and the number of the first."""
    file = ref.file
    lo, hi = ref.bounds(len(file.members))
    # The ETags of remote members stand in the bundle's own, in their order.
    etags = file.etag.split(",") if file.etag else [""] * len(file.members)
    return lo, [
        FileRef(member.path, member.name, member.size, "text", etag=etag)
        for member, etag in zip(file.members[lo:hi], etags[lo:hi], strict=True)
    ]


def bundle(
    ref: ChunkRef,
    fetched: Sequence[bytes | bytearray] | None,
    plain: Callable[[FileRef], PlainFile],
    judge: Judge,
) -> Documents:
    """Small files, each one a document."""
    members = ref.file.members
    lo, files = bundled(ref)
    hi = lo + len(files)
    if fetched is None:
        texts = [plain(file).read(0, min(file.size, judge.max_doc_bytes) + 1) for file in files]
    else:
        texts = [bytes(data) for data in fetched]
    column = binaries(texts)
    rows = np.arange(lo, hi, dtype=np.int64)
    return clean(column, rows, lambda i: Address(members[lo + i].name, None, 0), judge)
