"""Take the first part of the data through the stages one at a time, each by itself.

    footers ─► fetch, one and many at a time ─► decode ─► tokenize, one worker and all ─► pack ─► batch

In:    a `TextDataset` and how it would be run.
Out:   an `Alone`: how fast each stage is when nothing else runs.
Where: the calling thread; where several things are done at once, the workers and fetch threads of a run.
State: the first part of the data, some tens of megabytes, as far as the trial has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.encode.window import Place, flatten
from penstock.errors import NoData
from penstock.feed.pool import Pool, Result, Task, ThreadPool, make_pool
from penstock.order.plan import Plan
from penstock.read.reader import Reader
from penstock.read.storage import Bytes
from penstock.sources.files import TextSource
from penstock.sources.source import RowsProducer, Run
from penstock.sources.text import TextLanes
from penstock.types import ChunkRef, Documents, FileRef, MiB, Shard, TokenChunk
from penstock.watch.stage_timer import Clock, ThreadTimeline

if TYPE_CHECKING:
    from penstock.dataset import TextDataset
    from penstock.sources.network import Opened

PART_BYTES = 32 * MiB
"""Text that is looked at. More says little more, and takes memory and time."""
FILES = 8
"""Files whose footers are read."""
FETCHED = (
    "fetch_bytes_per_s",
    "in_flight_bytes_per_s",
    "fetch_p50_ms",
    "fetch_p95_ms",
    "first_byte_ms",
)
"""What may stay unknown: what the network gives, where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """How fast each stage is by itself. None: not measured, because this data has no such thing."""

    footer_ms: float | None
    """To learn a file's chunks."""
    remote: bool
    fetch_bytes_per_s: float | None
    """One fetch at a time; for local files what the disk, or its cache in memory, gives."""
    in_flight: int
    in_flight_bytes_per_s: float | None
    """With so many fetches at a time."""
    fetch_p50_ms: float | None
    fetch_p95_ms: float | None
    """How long one fetch takes when it is the only one."""
    first_byte_ms: float | None
    """Of it, the wait for the first byte."""
    decode_bytes_per_s: float
    """Bytes of text."""
    tokenize_bytes_per_s: float
    tokenize_tokens_per_s: float
    """One worker."""
    workers: int
    workers_bytes_per_s: float
    workers_tokens_per_s: float
    """All workers."""
    pack_tokens_per_s: float
    batch_tokens_per_s: float
    bytes_per_token: float
    """Of text."""
    stored_bytes_per_token: float | None
    """As it is read or fetched."""
    cropped_share: float
    padded_share: float
    """Of the tokens of the rows."""
    chunk_bytes: float
    """Text in a chunk, on average."""
    chunk_tokens: float
    token_chunk_bytes: float

    def ceilings(self) -> dict[str, float]:
        """Tokens a second that each stage could give at most, if the others cost nothing."""
        found = {
            "decode": self.workers * self.decode_bytes_per_s / self.bytes_per_token,
            "tokenize": self.workers_tokens_per_s,
            "pack": self.pack_tokens_per_s,
            "batch": self.batch_tokens_per_s,
        }
        fetched = self.in_flight_bytes_per_s if self.remote else self.fetch_bytes_per_s
        if fetched and self.stored_bytes_per_token:
            found = {"fetch": fetched / self.stored_bytes_per_token} | found
        return found


class Trial:
    """The first part of the data, on its way through the stages."""

    def __init__(self, dataset: TextDataset, run: Run, seconds: float) -> None:
        """`seconds`: how long each stage is looked at; always long enough for one chunk."""
        self._dataset = dataset
        self._run = run
        self._seconds = seconds
        self._opened: Opened | None = (
            dataset.outside.open(threads=True) if dataset.outside is not None else None
        )
        self._clock = Clock()
        files = self._opened.files if self._opened is not None else None
        # Without what is kept on disk of footers: what they cost is the question.
        self._reader = Reader(dataset.read, max(1, run.n_workers), 1, files, None, self._clock)
        self._refs: list[ChunkRef] = []
        self._footers: list[float] = []
        self._documents: list[tuple[ChunkRef, Documents]] = []
        self._bytes: list[list[Bytes] | None] = []
        self._made: dict[int, TokenChunk] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._opened is not None:
            self._opened.close()
        self._reader.close()

    def stop(self) -> None:
        """Have whoever fetches stop soon."""
        self._reader.stop()
        if self._opened is not None:
            self._opened.stop()

    def run(self, say: Callable[[str], None]) -> Alone:
        """All of it, in order."""
        say("footers")
        self._find()
        say("bandwidth")
        fetched = self._bandwidth()
        say("decode")
        decoded = self._decode()
        say("tokenize")
        tokenized = self._tokenize()
        say("pack")
        chunks = [self._made[number] for number in sorted(self._made)]
        packed = self._pack(chunks)
        tokens = sum(self._count(chunk) for chunk in chunks)
        text = sum(chunk.text_bytes for chunk in chunks)
        n = len(chunks)
        stored, known = decoded.pop("stored_bytes"), decoded.pop("text_bytes")
        numbers: dict[str, Any] = dict.fromkeys(FETCHED) | decoded | fetched | tokenized | packed
        return Alone(
            remote=self._dataset.fetches() > 0,
            in_flight=self._dataset.fetches(),
            footer_ms=1e3 * median(self._footers) if self._footers else None,
            bytes_per_token=text / tokens,
            stored_bytes_per_token=stored / known * text / tokens if stored and known else None,
            chunk_bytes=text / n,
            chunk_tokens=tokens / n,
            token_chunk_bytes=sum(chunk.nbytes for chunk in chunks) / n,
            **numbers,
        )

    # Reading

    def _find(self) -> None:
        """The chunks of the first files."""
        begun, size = perf_counter(), 0
        for number, file in enumerate(self._dataset.files):
            if self._refs and (
                number >= FILES or size >= PART_BYTES or perf_counter() - begun > self._seconds
            ):
                break
            refs = self._chunks_of(file)
            size += sum(ref.nbytes for ref in refs)
            self._refs += refs
        if not self._refs:
            raise self._nothing()

    def _chunks_of(self, file: FileRef) -> list[ChunkRef]:
        if file.open_ended:  # how many there are shows when its end is met
            step = self._dataset.read.chunk_bytes
            return [ChunkRef(file, i, step) for i in range(max(1, PART_BYTES // step))]
        begun = perf_counter()
        refs, _ = self._reader.inspect(file)
        if file.format == "parquet":
            self._footers.append(perf_counter() - begun)
        return refs

    def _bandwidth(self) -> dict[str, Any]:
        """What the network gives, if there is one: with one fetch at a time, and with many."""
        self._fetched = [ref for ref in self._refs if ref.file.remote and not ref.file.codec]
        if self._opened is None or not self._fetched:
            return {}
        with _threads(1, self, "fetch") as pool:
            one, elapsed = self._flood(pool, "fetch", self._seconds)
        spent, times = self._opened.times(), [seconds for seconds, _ in one]
        with _threads(self._dataset.fetches(), self, "fetch") as pool:
            many, together = self._flood(pool, "fetch", self._seconds)
        return {
            "fetch_bytes_per_s": sum(n for _, n in one) / elapsed,
            "in_flight_bytes_per_s": sum(n for _, n in many) / together,
            "fetch_p50_ms": 1e3 * _percentile(times, 0.5),
            "fetch_p95_ms": 1e3 * _percentile(times, 0.95),
            "first_byte_ms": 1e3 * spent["first_byte_s"] / max(1, spent["requests"]),
        }

    def _flood(
        self, pool: Pool, method: str, seconds: float, begin: int = 0
    ) -> tuple[list[Any], float]:
        """Keep everybody in a pool busy for a while. Gives the results, and how long they took together."""
        results: list[Any] = []
        waiting: deque[Task[Any]] = deque()
        begun, n = perf_counter(), begin
        while not results or perf_counter() - begun < seconds:
            while len(waiting) < 2 * pool.n_workers:
                waiting.append(pool.submit(method, n))
                n += 1
            results.append(waiting.popleft().result())
        # Those under way are waited for: they have had their part of the time.
        under_way = [task for task in waiting if not task.cancel()]
        results += [task.result() for task in under_way]
        return results, perf_counter() - begun

    # What pools call, with the number of the piece of work

    def fetch(self, number: int) -> tuple[float, int]:
        """Fetch a chunk, whatever is at hand of it. Gives the seconds it took, and its bytes."""
        begun = perf_counter()
        fetched = self._reader.fetch(self._fetched[number % len(self._fetched)], again=True)
        return perf_counter() - begun, sum(map(len, fetched))

    def tokenize(self, number: int) -> tuple[int, int]:
        """Tokenize a chunk, and keep it. Gives bytes of text, and tokens."""
        number %= len(self._documents)
        ref, documents = self._documents[number]
        chunk = self._dataset.tokenizer.encode(ref, documents, self._dataset.options.doc_batch)
        self._made[number] = chunk
        return chunk.text_bytes, self._count(chunk)

    def _count(self, chunk: TokenChunk) -> int:
        return len(flatten(chunk.docs, self._dataset.tokenizer.dtype)[0])

    # Working

    def _decode(self) -> dict[str, Any]:
        """Read and decode chunks, and keep their documents for what follows."""
        first = self._read_part()
        if not self._documents:
            raise self._nothing()
        # A second time without the disk, and with everything loaded that is loaded on first use. Not for files that
        # are read forwards: they would begin anew.
        again = (
            first if any(ref.file.open_ended for ref, _ in self._documents) else self._read_again()
        )
        disk: dict[str, Any] = {}
        if first.seconds.get("fetch") and not self._dataset.fetches():
            disk["fetch_bytes_per_s"] = first.bytes["fetch"] / first.seconds["fetch"]
        return disk | {
            "decode_bytes_per_s": again.bytes["decode"] / max(1e-9, again.seconds["decode"]),
            "stored_bytes": first.bytes.get("fetch", 0),
            "text_bytes": first.bytes["decode"],
        }

    def _read_part(self) -> ThreadTimeline:
        """Chunks for as long as there is time and memory."""
        track = self._clock.new_timeline("part")
        self._clock.adopt(track)
        size, begun, ended = 0, perf_counter(), None
        for ref in self._refs:
            if self._documents and (size >= PART_BYTES or perf_counter() - begun > self._seconds):
                break
            if ref.file is ended:
                continue
            fetched = None
            if ref.file.remote and not ref.file.codec:
                fetched = self._reader.fetch(ref)
                track.count("fetch", 1, sum(map(len, fetched)))
            documents = self._read(track, ref, fetched)
            size += documents.texts.nbytes
            if documents.last and ref.file.open_ended:
                ended = ref.file
            if len(documents.texts) > documents.empty:
                self._documents.append((ref, documents))
                self._bytes.append(fetched)
        return track

    def _read_again(self) -> ThreadTimeline:
        track = self._clock.new_timeline("again")
        self._clock.adopt(track)
        begun, n = perf_counter(), 0
        while not n or perf_counter() - begun < self._seconds:
            at = n % len(self._documents)
            self._read(track, self._documents[at][0], self._bytes[at])
            n += 1
        self._bytes.clear()
        return track

    def _read(self, track: ThreadTimeline, ref: ChunkRef, fetched: list[Bytes] | None) -> Documents:
        with self._clock.stage("decode", ref):
            documents = self._reader.read(ref, fetched)
        track.count("decode", len(documents.rows), documents.texts.nbytes)
        return documents

    def _tokenize(self) -> dict[str, Any]:
        """By one worker and by all."""
        workers = max(1, self._run.n_workers)
        one = self._tokenize_by(1)
        every = self._tokenize_by(workers) if workers > 1 else one
        return {
            "tokenize_bytes_per_s": one[0],
            "tokenize_tokens_per_s": one[1],
            "workers": workers,
            "workers_bytes_per_s": every[0],
            "workers_tokens_per_s": every[1],
        }

    def _tokenize_by(self, workers: int) -> tuple[float, float]:
        """Bytes and tokens a second. Each worker first loads its vocabulary and learns the common words."""
        with _threads(workers, self, "worker") as pool:
            warm, _ = self._flood(pool, "tokenize", self._seconds / 2)
            done, elapsed = self._flood(pool, "tokenize", self._seconds, len(warm))
        if not any(tokens for _, tokens in warm + done):
            raise self._nothing()
        return sum(n for n, _ in done) / elapsed, sum(n for _, n in done) / elapsed

    def _pack(self, chunks: list[TokenChunk]) -> dict[str, Any]:
        """Rows and batches of tokens that are at hand."""
        clock = Clock()
        source = TextSource(self._dataset)
        run = replace(
            self._run, lanes=1, shard=Shard(1, 0), places={0: Place()}, first_epoch=0, end_epoch=None,
            tensors=False, narrow=False, report_docs=0, clock=clock,
        )  # fmt: skip
        lanes = _HeldLanes(chunks, self._dataset, run)
        producer = RowsProducer(source, run, lanes)
        track, tokens, begun = clock.timeline(), 0, perf_counter()
        try:
            while not tokens or perf_counter() - begun < self._seconds:
                with clock.stage("pack"):
                    batches = producer.next()
                tokens += sum(batch.tokens for batch in batches)
            totals = producer.totals()
        finally:
            producer.close()
        return {
            "pack_tokens_per_s": tokens / max(1e-9, track.seconds["pack"]),
            "batch_tokens_per_s": tokens / max(1e-9, track.seconds["batch"]),
            "cropped_share": totals["cropped_tokens"] / (tokens + totals["cropped_tokens"]),
            "padded_share": min(1.0, totals["padded_tokens"] / tokens),
        }

    def _nothing(self) -> NoData:
        first = self._dataset.files[0].path
        return NoData(
            f"the first files ({first} …) hold no text: nothing but empty, skipped or filtered documents. "
            "Name other data, or another text_field."
        )


@contextmanager
def _threads(n: int, trial: Trial, name: str) -> Iterator[Pool]:
    pool = ThreadPool(n, trial, name=name)
    try:
        yield pool
    except BaseException:
        trial.stop()  # what one fetch has failed with, others would try for as long again
        raise
    finally:
        pool.stop()
        pool.join(10.0)


class _HeldLanes(TextLanes):
    """One lane of chunks whose tokens are at hand, over and over."""

    def __init__(self, chunks: list[TokenChunk], dataset: TextDataset, run: Run) -> None:
        size = sum(chunk.ref.nbytes for chunk in chunks)
        self._held = FileRef("held", "held", size, "jsonl")
        self._chunks = [
            replace(chunk, ref=ChunkRef(self._held, i, chunk.ref.nbytes), bad=[])
            for i, chunk in enumerate(chunks)
        ]
        super().__init__(
            plan=Plan(files=(self._held,), lanes=1, shuffle=run.shuffle, seed=run.seed),
            pack=dataset.pack(),
            run=run,
            pool=make_pool(0, None),
            read_ahead_bytes=run.read_ahead_bytes,
        )

    def chunks_of(self, group: tuple[int, ...]) -> list[list[ChunkRef]]:
        return [[chunk.ref for chunk in self._chunks] for _ in group]

    def submit(self, ref: ChunkRef, place: Place, fresh: bool) -> Task[TokenChunk]:
        task: Result[TokenChunk] = Result()
        task.set_result(self._chunks[ref.index])
        return task


def _percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
