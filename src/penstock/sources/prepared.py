"""PreparedDataset: a corpus that `penstock prepare` has tokenized, with a global shuffle.

Blocks of about 65,536 tokens of the whole corpus are ordered by one permutation and assigned to
lanes round-robin. A chunk is a few blocks that follow each other in a lane. Needs neither source
nor tokenizer. Chunks on disk are read by workers; those in a bucket by the I/O pool.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.feed.worker_pool import Pool, Task, ThreadPool
from penstock.options import accepts, from_habit, option, options, options_of
from penstock.order.permute import permute
from penstock.order.plan import Plan
from penstock.order.shuffle import I64, mix
from penstock.prepare.manifest import Manifest, read_blocks, read_manifest
from penstock.read.arrow_utils import as_numpy, lengths
from penstock.read.token_store import Block, TokenStore
from penstock.read.validation import blank
from penstock.sources.base import RunContext, Work, noted
from penstock.sources.chunk_lanes import ChunkLanes, ChunkReader, ChunkSource
from penstock.types import Address, ChunkRef, LanePosition, Packing, TokenChunk
from penstock.watch.loader_stats import SourceChunks
from penstock.watch.stage_timer import Clock

GROUP_BLOCKS = 512
"""Blocks of a lane whose order is computed at once."""
GROWTH = 8
"""Windows of the first epoch have 1, 8 and then 64 chunks: they are read faster than consumed."""
CHUNK_BLOCKS = 8
"""Blocks in a chunk. Handling a chunk takes longer than reading a block."""
SINGLE_BLOCKS = 1 + 8 + 64
"""The first blocks of a run, in its three small windows, are chunks of their own: the first batch
waits for one block, and a bucket is asked for the next ones in parallel."""
FETCHES = 16
"""Requests in flight to a bucket."""
_BLOCKS = 6  # a permutation of blocks shares no key with those of text


@options
class PreparedOptions:
    """How a prepared corpus is packed.

    seq_len: Inputs per row. The cost of attention grows with its square.
    packing: As for text: "concat", "bos" or "best_fit".
    positions: Add positions and cu_seqlens to batches: 8 more bytes per token.
    shuffle_blocks: Blocks of 65,536 tokens in a shuffle window. More mix better, but each lane has two
        windows in memory, 128 MiB by default with ids of 2 bytes.
    skip: Documents to leave out: spans or addresses of `batch.provenance()`.
    """

    _: KW_ONLY
    seq_len: int = option(minimum=1)
    packing: Packing = "concat"
    positions: bool = False
    shuffle_blocks: int = option(default=512, minimum=1)
    skip: Iterable[Sequence[Any]] = ()


class PreparedDataset:
    """A prepared corpus, streamed as packed rows of ids."""

    @accepts(PreparedOptions)
    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Read the manifest of a corpus.

        path: the folder or bucket (s3://, gs://, az://) that `penstock prepare` wrote.
        """
        self.options = PreparedOptions(**from_habit(kwargs, options_of(PreparedOptions)))
        self.seq_len = self.options.seq_len
        self.store = TokenStore(path)
        self.manifest: Manifest = read_manifest(self.store)
        about = self.manifest.about
        self.documents: int = about["documents"]
        self.tokens: int = about["tokens"]
        self.dtype = np.dtype(about["tokenizer"]["dtype"])
        self.vocab_size: int = about["tokenizer"]["vocab_size"]
        self.skip = frozenset(map(Address.of, self.options.skip))

    def __repr__(self) -> str:
        return (
            f"PreparedDataset({self.store.place}, {self.tokens:,} tokens, seq_len={self.seq_len})"
        )

    def as_source(self) -> PreparedSource:
        """Return what a loader reads: packed rows of ids."""
        return PreparedSource(self)


@dataclass(frozen=True, slots=True)
class BlocksRef(ChunkRef):
    """The address of adjacent blocks: their chunk of the source, and where their tokens are."""

    entry: str = ""
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class MergedRef(ChunkRef):
    """The address of a chunk: blocks from anywhere in the corpus."""

    runs: tuple[BlocksRef, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan(Plan):
    """Assigns the blocks of an epoch to lanes round-robin, in order or in one global permutation."""

    manifest: Manifest
    chunk_blocks: int

    def numbers(self, lane: int, epoch: int, first: int = 0, last: int | None = None) -> I64:
        """Return the corpus-wide numbers of the lane's blocks [first, last)."""
        n = len(self.manifest.offsets)
        own = range(lane, n, self.lanes)[first:last]
        places = np.arange(own.start, own.stop, own.step)
        return permute(n, mix(self.seed, epoch, _BLOCKS), places) if self.shuffle else places

    def groups(self, lane: int, epoch: int) -> list[tuple[int, ...]]:
        blocks = len(range(lane, len(self.manifest.offsets), self.lanes))
        return [(number,) for number in range(-(-blocks // GROUP_BLOCKS))]

    def chunks(self, lane: int, epoch: int, number: int, *_: Any) -> list[ChunkRef]:
        manifest, begin = self.manifest, number * GROUP_BLOCKS
        numbers = self.numbers(lane, epoch, begin, begin + GROUP_BLOCKS)
        entries, names, blocks = manifest.locate(numbers)
        # A new run begins where blocks are not adjacent.
        new_chunk = np.arange(len(numbers)) % self.chunk_blocks == 0
        new_chunk[: SINGLE_BLOCKS + 1] |= epoch == number == 0
        new_run = (
            new_chunk | (np.diff(entries, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 1)
        )
        chunks: list[list[BlocksRef]] = []
        for begin, end in itertools.pairwise([*np.flatnonzero(new_run).tolist(), len(numbers)]):
            entry, own = entries[begin], tuple(blocks[begin:end])
            file, index = manifest.files[manifest.file_numbers[entry]], int(manifest.chunks[entry])
            nbytes = sum(block.id_bytes for block in own)
            if new_chunk[begin]:
                chunks.append([])
            chunks[-1].append(BlocksRef(file, index, nbytes, entry=names[begin], blocks=own))
        refs: list[ChunkRef] = []
        for runs in chunks:
            first, nbytes = runs[0], sum(run.nbytes for run in runs)
            refs.append(MergedRef(first.file, first.index, nbytes, lane=lane, runs=tuple(runs)))
        return refs

    def lane_tokens(self, lane: int, epoch: int, itemsize: int) -> int:
        """Return the tokens of a lane in an epoch."""
        return int(self.manifest.blocks["id_bytes"][self.numbers(lane, epoch)].sum()) // itemsize

    def balance(self) -> float:
        """Return the number of blocks of the smallest lane, as a share of the mean."""
        n = len(self.manifest.offsets)
        return n // self.lanes * self.lanes / n if n else 1.0


class BlockWork(Work):
    """What workers do: read and check a chunk."""

    def __init__(self, store: TokenStore, skip: frozenset[Address], clock: Clock) -> None:
        self.store, self.clock = store, clock
        self._skip: dict[tuple[str, int | None], list[int]] = {}
        for file, group, row in skip:
            self._skip.setdefault((file, group), []).append(row)

    def read(self, ref: MergedRef) -> TokenChunk:
        batches = list(map(self._read, ref.runs))
        merged = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        docs, rows = merged.column(0), as_numpy(merged.column(1))
        parts = list(zip(ref.runs, map(len, batches), strict=True))
        empty = int(np.count_nonzero(lengths(docs) == 0))
        if self._skip:
            skipped = list(map(self._skipped, ref.runs, batches))
            docs = blank(docs, np.flatnonzero(np.concatenate(skipped)))
        return TokenChunk(ref, docs, rows, False, [], empty, 0, cached=True, merged=parts)

    def _read(self, run: BlocksRef) -> pa.RecordBatch:
        note = f"in stage fetch, reading {run} from {self.store.place}/{run.entry}"
        with noted(note), self.clock.stage("fetch", run) as timeline:
            batch = read_blocks(self.store, run.entry, run.blocks)
        timeline.count("fetch", len(run.blocks), sum(block.length for block in run.blocks))
        return batch

    def _skipped(self, ref: ChunkRef, batch: pa.RecordBatch) -> Any:
        file, rows = ref.file, as_numpy(batch.column(1))
        if file.members:
            return [(file.members[row].name, None) in self._skip for row in rows.tolist()]
        group = ref.index if file.format == "parquet" else None
        return np.isin(rows, self._skip.get((file.name, group), []))


class BlockChunks(ChunkReader):
    """The chunks of a corpus, for the lanes of one rank."""

    def __init__(self, dataset: PreparedDataset, run: RunContext, pool: Pool, work: Work) -> None:
        manifest = dataset.manifest
        self._pool = pool
        self._source_chunks = SourceChunks(
            manifest.documents_of_entries(),
            manifest.about["settings"]["chunk_bytes"][0],
            parts=max(1.0, len(manifest.offsets) / max(1, len(manifest.names))),
        )
        if "://" in dataset.store.place and pool.n_workers:
            self.io = ThreadPool(FETCHES, work, name="fetch", clock=run.clock)
            self.fetches = FETCHES

    def submit(self, ref: ChunkRef, position: LanePosition) -> Task[TokenChunk]:
        return (self.io or self._pool).submit("read", ref)

    def gauges(self) -> dict[str, Any]:
        return {"fetches": self.fetches, "cached": True, "source_chunks": self._source_chunks}


class PreparedSource(ChunkSource):
    """A `PreparedDataset` as the loader sees it."""

    settings = ("seq_len", "packing", "shuffle_blocks")
    window_growth = GROWTH
    expansion = 1

    def __init__(self, dataset: PreparedDataset) -> None:
        wanted = dataset.options.shuffle_blocks
        self._chunk_blocks = min(CHUNK_BLOCKS, wanted)
        super().__init__(dataset, -(-wanted // self._chunk_blocks))
        self.dtype, self.skip = dataset.dtype, dataset.skip
        self.pad_id = dataset.manifest.about["tokenizer"]["pad_id"]

    def data_id(self) -> dict[str, Any]:
        about = self.dataset.manifest.about
        return {"corpus": about["sha256"][:16], "tokens": about["tokens"]}

    def tokenizer_id(self) -> dict[str, Any]:
        tokenizer = self.dataset.manifest.about["tokenizer"]
        return {name: tokenizer[name] for name in ("name", "fingerprint")}

    def work(self, run: RunContext) -> BlockWork:
        return BlockWork(self.dataset.store, run.skip, run.clock)

    def batches(self, run: RunContext) -> int | None:
        """Return the batches of a pass; None for packings that depend on the documents."""
        if self.packing != "concat" or run.end_epoch is None or run.skip:
            return None
        plan, size = self._plan(run), self.dtype.itemsize
        rows = []
        for lane in range(run.lanes):
            epochs = range(run.first_epoch, run.end_epoch)
            tokens = sum(plan.lane_tokens(lane, epoch, size) for epoch in epochs)
            full, left = divmod(max(0, tokens - 1), self.seq_len)
            rows.append(full + (left > 0 and not run.drop_last))
        mod = run.shard.mod
        ranks = [rows[rank::mod] for rank in ([run.shard.rem] if run.alone else range(mod))]
        if not run.drop_last:
            return -(-sum(ranks[run.shard.rem if len(ranks) > 1 else 0]) // run.batch_size)
        # The stream ends with the first lane that has no row for its turn, on all ranks together.
        ends = [min(n * len(own) + i for i, n in enumerate(own)) for own in ranks]
        return min(ends) // run.batch_size

    def open_lanes(self, run: RunContext, pool: Pool, work: BlockWork) -> ChunkLanes:
        plan = self._plan(run)
        reader = BlockChunks(self.dataset, run, pool, work)
        return ChunkLanes(self, plan, reader, run, pool)

    def _plan(self, run: RunContext) -> BlockPlan:
        lanes, manifest = run.lanes, self.dataset.manifest
        return BlockPlan(
            files=(), lanes=lanes, shuffle=run.shuffle, seed=run.seed, manifest=manifest,
            chunk_blocks=self._chunk_blocks,
        )  # fmt: skip
