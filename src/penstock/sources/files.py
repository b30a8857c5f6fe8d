"""Text in files, here or elsewhere.

    files ──plan──► chunks ══ fetch ══► bytes ══ decode · tokenize ══► token chunks
             pure              fetch threads            workers              │  ▲
                                                                     cache writer, and next time from disk

In:    a `TextDataset`, and a place for each lane.
Out:   rows, by lane; chunks on their way to the token cache.
Where: the producer thread. Footers and bytes of remote files are fetched by threads of their own, ahead
       of the workers, so that no core waits for a network.
State: which files have been looked into.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.encode.window import Place
from penstock.errors import SourceChanged, SourceError
from penstock.feed.pool import Pool, Task, ThreadPool
from penstock.order.plan import Plan
from penstock.read.records import Quarantine
from penstock.sources.source import RowSource, Run
from penstock.sources.text import TextLanes, check_place
from penstock.sources.text_work import TextWork
from penstock.state import State
from penstock.types import Address, Bad, ChunkRef, FileRef, TokenChunk

if TYPE_CHECKING:
    from penstock.dataset import TextDataset
    from penstock.feed.keep import CacheWriter

log = logging.getLogger("penstock")

FOUND = ("cache_hits", "cache_misses")
FIRST_BYTES = 8
"""For the first batch, text of so many bytes a token is tokenized before the rest of its chunk: enough for most texts, and
else the batch waits for the rest."""
WRITE_S = 120.0
"""How long a staging waits for a disk: for room in the writer's queue, and for the rest of it in the end."""


class FileLanes(TextLanes):
    """Lanes that read files."""

    def __init__(self, dataset: TextDataset, run: Run, pool: Pool, work: TextWork) -> None:
        self._inspected: OrderedDict[int, Task[tuple[list[ChunkRef], list[Bad]]]] = OrderedDict()
        self._work = work
        self._patient = self._told_unkept = False
        self._prepared = pool.n_workers == 0
        self._before: dict[int, tuple[ChunkRef, Task[TokenChunk], bool]] = {}
        # A shuffled window, and one from which documents are chosen to fit, is needed as a whole.
        split = (
            not run.shuffle and dataset.options.packing != "best_fit" and type(pool) is ThreadPool
        )
        self._first = (
            FIRST_BYTES * run.batch_size * dataset.seq_len // len(run.own_lanes) if split else 0
        )
        compressed = self.forward = any(file.open_ended for file in dataset.files)
        # A mixture may open each lane by itself; what there is for all of them is then divided.
        own = len(run.own_lanes)
        super().__init__(
            plan=Plan(files=dataset.files, lanes=run.lanes, shuffle=run.shuffle, seed=run.seed),
            pack=dataset.pack(),
            run=run,
            pool=pool,
            read_ahead_bytes=run.read_ahead_bytes - (work.lane_bytes * own if compressed else 0),
        )
        self._quarantine = Quarantine(dataset.quarantine) if dataset.quarantine else None
        self._writer: CacheWriter | None = None
        if work.cache is not None:
            from penstock.feed.keep import QUEUED_BYTES, CacheWriter
            from penstock.sources.foresight import Foresight

            self._writer = CacheWriter(work.cache, QUEUED_BYTES * own // work.lanes)
            work.foresee(run.own_lanes, Foresight(self._plan, self._lanes, work.file_hash))
        # What is remote is fetched by threads of its own, in this process, whatever the workers are. They come
        # last: nobody would end them if something else failed here.
        self._fetches = -(-dataset.fetches() * own // work.lanes) if pool.n_workers > 0 else 0
        self._fetchers = (
            ThreadPool(self._fetches, work, name="fetch", clock=run.clock)
            if self._fetches
            else None
        )

    def chunks_of(self, group: tuple[int, ...]) -> list[list[ChunkRef]]:
        """The chunks of some files: their footers are read side by side, and kept for a while."""
        self.foresee(group)
        chunks = []
        for index in group:
            refs, bad = self._inspected[index].result()
            if bad and index not in self._work.reported:
                self._work.reported.add(index)
                self.report(bad)
            chunks.append(refs)
        while len(self._inspected) > max(64, len(group)) and self._plan.whole_files:
            self._inspected.popitem(last=False)
        return chunks

    def foresee(self, group: tuple[int, ...]) -> None:
        """Have the footers of some files read, before everything else that waits."""
        for index in group:
            if index not in self._inspected and not self._plan.files[index].open_ended:
                file = self._plan.files[index]
                pool = self._fetchers if self._fetchers is not None and file.remote else self._pool
                self._inspected[index] = pool.submit("inspect", file, first=True)

    def known(self, group: tuple[int, ...]) -> bool:
        return all(index in self._inspected and self._inspected[index].ready() for index in group)

    def submit(self, ref: ChunkRef, place: Place, fresh: bool) -> Task[TokenChunk]:
        if ref.file.open_ended:
            return self._submit_next(ref)
        if self._work.at_hand(ref):
            return self._pool.submit("encode", ref)
        enough = self._first if fresh and not self._patient else 0
        if self._fetchers is None or not ref.file.remote or ref.file.codec:
            task = self._pool.submit("encode", ref, None, False, enough)
            # Where there is no other thread, the chunk goes first.
            self._prepare(
                beside=type(self._pool) is ThreadPool
                and self._pool.n_workers > 1
                and not ref.file.codec
            )
            return task
        self._prepare()
        fetched = self._fetchers.submit("fetch", ref)
        return self._pool.submit("encode", before=lambda: (ref, fetched.result(), False, enough))

    def _prepare(self, beside: bool = False) -> None:
        if not self._prepared:
            self._prepared = True
            self._pool.submit("prepare", beside)

    def _submit_next(self, ref: ChunkRef) -> Task[TokenChunk]:
        """The next chunk of a file that is read forwards, by whoever has begun with it."""
        last, before, doubtful = self._before.get(ref.reader, (None, None, False))
        at_hand = self._work.at_hand(ref)
        task: Task[TokenChunk]
        if (
            before is not None
            and doubtful
            and not at_hand
            and last is not None
            and last.file is ref.file
        ):
            # What is before it is at hand, and this is not: perhaps because the file has ended there, which
            # is not worth opening it for.
            waited_for = before
            task = self._pool.submit(
                "encode", before=lambda: (ref, None, waited_for.result().last), to=ref.reader
            )
        else:
            task = self._pool.submit("encode", ref, to=ref.reader)
            doubtful = at_hand
        self._before[ref.reader] = (ref, task, doubtful)
        return task

    def beyond(self, workers: int) -> int:
        # The first chunk has the link to itself. After that, twice as many as are fetched at once: while one
        # of them is late, the others go on.
        return super().beyond(workers) + (2 * self._fetches if self._counts.chunks else 0)

    def _use(self, chunk: TokenChunk) -> None:
        if chunk.last and chunk.ref.file.open_ended:
            # The file is over. When its turn comes again, nothing comes before its first chunk.
            self._before.pop(chunk.ref.reader, None)
        super()._use(chunk)
        if self._writer is None or chunk.cached or chunk.rest is not None:
            return
        if not self._work.keeps(chunk.ref.file):
            self._not_kept(chunk.ref.file)
        elif not self._patient:
            self._writer.offer(self._work.key(chunk.ref), chunk.whole or chunk)
        elif not self._writer.put(self._work.key(chunk.ref), chunk, WRITE_S):
            raise self._stuck()

    def _not_kept(self, file: FileRef) -> None:
        told = (
            f"{file.path}: its server sends neither an ETag nor a date, so nothing would tell when it changes, and its tokens "
            "are not kept"
        )
        if self._patient:
            raise SourceError(f"{told}. Use a server that sends one, or copy the file to disk.")
        if not self._told_unkept:
            self._told_unkept = True
            log.warning("%s (further files like it are not named)", told)

    def stage(self) -> Iterator[TokenChunk]:
        """Every chunk in the order in which the lanes need them, each in the cache or on its way there."""
        self._patient = True
        lanes = list(self._lanes)
        while lanes:
            for lane in list(lanes):
                self._read_ahead()
                chunk = lane.next_chunk()
                if chunk is None:
                    lanes.remove(lane)
                else:
                    yield chunk

    def flush(self) -> None:
        """Wait until everything is in the cache."""
        if self._writer is not None and not self._writer.flush(WRITE_S):
            raise self._stuck()

    def _stuck(self) -> SourceError:
        assert self._work.cache is not None
        return SourceError(
            f"the cache in {self._work.cache.folder} did not take what was read within {WRITE_S:.0f} s. Look at the "
            "disk, or name another folder with PENSTOCK_CACHE."
        )

    def cache_trouble(self) -> str | None:
        """Why chunks are not being kept, if they are not."""
        cache = self._work.cache
        if cache is None or cache.off is not None:
            return (
                "there is no cache"
                if cache is None
                else f"the cache cannot be written: {cache.off}"
            )
        if cache.full:
            return f"the cache is full: it may take {cache.max_bytes} bytes. Allow more: remote=RemoteOptions(cache_bytes=…)"
        if cache.counts()["cache_refused"]:
            return f"{cache.folder} was cleared while it was written to. Do it again; what is there is not fetched again."
        return None

    def totals(self) -> dict[str, int]:
        return self.of_work() | self.of_lanes()

    def of_work(self) -> dict[str, int]:
        """What belongs to the work, however many times lanes were opened on it: the network's counts, and the cache's."""
        cache = self._work.cache
        kept = {} if cache is None else cache.counts()
        # What a worker found in the cache counts once it is used, whichever process it was found by.
        return self._work.counts() | {name: n for name, n in kept.items() if name not in FOUND}

    def of_lanes(self) -> dict[str, int]:
        """What belongs to these lanes alone."""
        skipped = {"cache_skipped": self._writer.skipped} if self._writer is not None else {}
        return skipped | super().totals()

    @property
    def cached(self) -> bool:
        """Whether token chunks are kept on disk."""
        return self._writer is not None

    def fetch_times(self) -> dict[str, Any] | None:
        """Where fetches spend their time, where any are made."""
        return self._work.fetch_times() if self._fetches else None

    @property
    def fetches(self) -> int:
        """Requests that may be under way at once."""
        return self._fetches

    def set_fetches(self, fetches: int) -> None:
        """Have more or fewer under way. It changes when things come, and nothing else."""
        assert self._fetchers is not None
        self._work.resize(fetches)
        self._fetchers.resize(fetches)
        self._fetches = fetches

    def stop(self) -> None:
        if self._fetchers is not None:
            self._fetchers.stop()
        if self._writer is not None:
            self._writer.stop()  # what it has taken is still written, and its thread ends then

    def report(self, bad: Sequence[Bad]) -> None:
        super().report(bad)
        if self._quarantine is not None:
            self._quarantine.write(list(bad))

    def close(self) -> None:
        if self._fetchers is not None:
            self._fetchers.join(5.0)
        if self._writer is not None:
            self._writer.close()
        if self._quarantine is not None:
            self._quarantine.close()


class TextSource(RowSource):
    """A `TextDataset`, as the loader sees it."""

    def __init__(self, dataset: TextDataset) -> None:
        self._dataset = dataset
        self.files = dataset.files
        self.seq_len = dataset.seq_len
        self.report_docs = dataset.options.report_docs
        self.positions = dataset.options.positions
        self.dtype = dataset.tokenizer.dtype
        self.skip: frozenset[Address] = dataset.read.skip

    def listings(self) -> list[tuple[float, float]]:
        told, self._dataset.listing_told = self._dataset.listing_told, True
        return [] if told else [self._dataset.listed]

    def data_id(self) -> dict[str, Any]:
        return self._dataset.data_id()

    def tokenizer_id(self) -> dict[str, Any]:
        return self._dataset.tokenizer_id()

    def settings_id(self) -> dict[str, Any]:
        return self._dataset.settings_id()

    def first_place(self, epoch: int) -> Place:
        return Place(epoch=epoch)

    def check_place(self, value: Any) -> Place:
        return check_place(value)

    def check_data(self, state: State) -> None:
        """Data that changed elsewhere is refused with the name of the file, where that can be known."""
        files = self._dataset.data_id()["files"]
        if self._dataset.outside is not None and state.data.get("files") != files:
            text = self._dataset.outside.explain_change(
                str(state.data.get("files")), self._dataset.files
            )
            if text is not None:
                raise SourceChanged(f"the data changed since the state was saved: {text}")

    def work(self, run: Run) -> TextWork:
        dataset = self._dataset
        return TextWork(
            replace(dataset.read, skip=run.skip),
            dataset.tokenizer,
            dataset.options.doc_batch,
            run.n_workers,
            len(run.own_lanes),
            dataset.outside,
            run.clock,
            threads=run.n_workers > 0,
        )

    def open_lanes(self, run: Run, pool: Pool, work: TextWork) -> FileLanes:
        return FileLanes(self._dataset, run, pool, work)
