"""What the lanes of a mixture's part share: memory, threads, counts; and what is left of parts that cannot be opened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.feed.pool import ThreadPool
from penstock.sources.mixed_lanes import MixLanes

from penstock import AsyncDataLoader, ConfigError, Mixture, RemoteOptions, TextDataset
from penstock.config import cache_dir
from penstock.errors import SourceChanged, StateMismatch
from penstock.read.cache import entries
from tests.reading import bytes_of, write_jsonl
from tests.servers import HubServer

LANES = 4
SEQ = 32
QUICK = RemoteOptions(retry_budget=2, metadata_budget=2, backoff=0.02, connect_timeout=1, fetches=8)


def parquet(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=4)
    return bytes(sink.getvalue())


def write(folder: Path, name: str, files: int = LANES) -> Path:
    """A folder of files that can be dealt to lanes whole."""
    (folder / name).mkdir()
    for i in range(files):
        texts = [f"{name} {i} {j} " * (2 + j % 3) for j in range(24)]
        (folder / name / f"{i}.parquet").write_bytes(parquet(texts))
    return folder / name


FAR = {f"data/{i}.parquet": parquet([f"far {i} {j}" for j in range(24)]) for i in range(LANES)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
        server.add("org/name", FAR)
        yield server


def far_away(name: str = "org/name") -> TextDataset:
    return TextDataset(f"hf://datasets/{name}/data", tokenizer="byte", seq_len=SEQ, remote=QUICK)


def loader_of(mixed: Mixture, **how: Any) -> AsyncDataLoader:
    options = {"batch_size": 4, "lanes": LANES, "n_workers": 1, "seed": 2}
    return AsyncDataLoader(mixed, **(options | how))


@contextmanager
def opened(loader: AsyncDataLoader) -> Iterator[tuple[Any, MixLanes]]:
    """The work and the lanes of a run, all of whose parts have been opened."""
    source, run = loader.lay_open()
    work = source.work(run)
    pool = ThreadPool(1, work)
    lanes: MixLanes | None = None
    try:
        lanes = source.open_lanes(run, pool, work)  # type: ignore[attr-defined]
        for packer in lanes.packers:
            packer.rows(1)
        yield work, lanes
    finally:
        pool.stop()
        for one in (lanes, work):
            if one is not None:
                one.stop()
        pool.join(10)
        for one in (lanes, work):
            if one is not None:
                one.close()


@pytest.mark.parametrize("on_end", ["restart", "stop", "leave"])
def test_lanes_share_the_memory_and_the_threads_of_their_part(
    hub: HubServer, tmp_path: Path, on_end: Any
) -> None:
    here = bytes_of(write(tmp_path, "near"), seq_len=SEQ)
    loader = loader_of(Mixture({"far": (far_away(), 1), "here": (here, 1)}, on_end=on_end))
    _, run = loader.lay_open()
    with opened(loader) as (_, lanes):
        assert sum(part._budget for part in lanes._opened.values()) <= run.read_ahead_bytes  # type: ignore[attr-defined]
        fetching = [
            thread for thread in threading.enumerate() if thread.name.startswith("penstock-fetch-")
        ]
        assert len(fetching) == lanes.fetches == 8


def test_lanes_share_the_room_for_what_is_decompressed(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(200)]
    for i in range(LANES):
        with pa.CompressedOutputStream(str(tmp_path / f"{i}.jsonl.gz"), "gzip") as out:
            out.write(write_jsonl(tmp_path / "plain", texts).read_bytes())
    (tmp_path / "plain").unlink()
    data = bytes_of(tmp_path, seq_len=SEQ, chunk_bytes=1024)
    loader = loader_of(Mixture({"a": (data, 1)}, on_end="stop"))
    _, run = loader.lay_open()
    with opened(loader) as (work, lanes):
        kept = LANES * work.named("a").lane_bytes
        budgets = [part._budget for part in lanes._opened.values()]  # type: ignore[attr-defined]
        assert len(budgets) == LANES
        assert sum(budgets) == pytest.approx(run.read_ahead_bytes - kept, abs=LANES)


@pytest.mark.parametrize("on_end", ["stop", "leave"])
def test_what_the_work_of_a_part_counts_is_counted_once(
    hub: HubServer, tmp_path: Path, on_end: Any
) -> None:
    here = bytes_of(write(tmp_path, "near"), seq_len=SEQ)
    mixed = Mixture({"far": (far_away(), 1), "here": (here, 1)}, on_end=on_end)
    listed = len(hub.log)
    with loader_of(mixed, epochs=2) as loader:
        for _ in loader:
            pass
        loader.shutdown()
        stats = loader.stats()
    assert stats.requests == len(hub.log) - listed > 0
    assert stats.cache_written == len(list(entries(cache_dir()))) > 0


def test_a_file_that_cannot_be_read_is_told_of_once(tmp_path: Path) -> None:
    folder = write(tmp_path, "some", files=2)
    (folder / "9.parquet").write_bytes(b"no parquet at all")
    data = bytes_of(folder, seq_len=SEQ, on_bad_record="skip")
    with loader_of(Mixture({"a": (data, 1)}, on_end="stop"), epochs=2) as loader:
        for _ in loader:
            pass
        assert loader.stats().bad == {"corrupt": 1}


def test_the_cache_foresees_what_every_lane_needs(tmp_path: Path) -> None:
    data = bytes_of(write(tmp_path, "some"), seq_len=SEQ, cache=True)
    with opened(loader_of(Mixture({"a": (data, 1)}, on_end="stop"))) as (work, _):
        part = work.named("a")
        when = part.cache._room.when
        assert [when(part.file_hash(file), 5) is not None for file in data.files] == [True] * LANES


def test_a_verdict_knows_of_the_requests_and_the_cache_of_the_parts(
    hub: HubServer, tmp_path: Path
) -> None:
    near = write(tmp_path, "near")
    for cached in (True, False):
        here = bytes_of(near, seq_len=SEQ, cache=cached)
        mixed = Mixture({"far": (far_away(), 1), "here": (here, 1)})
        with loader_of(mixed) as loader:
            next(loader)
            assert loader._pipeline is not None
            known = loader._pipeline.known()
        assert (known.remote, known.fetches, known.cached) == (True, 8, cached)


def test_a_part_that_cannot_be_opened_leaves_nothing_of_those_before_it(
    hub: HubServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    bad = {"on_bad_record": f"quarantine:{tmp_path / 'file' / 'bad.jsonl'}"}
    here = bytes_of(write(tmp_path, "near"), seq_len=SEQ, **bad)
    loader = loader_of(Mixture({"far": (far_away(), 1), "here": (here, 1)}))
    with pytest.raises(ConfigError, match="cannot write the quarantine"), opened(loader):
        pass
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-fetch-")
    ]


def test_data_of_a_part_that_changed_is_refused_with_the_name_of_the_file(
    hub: HubServer, tmp_path: Path
) -> None:
    repository = hub.add("org/changes", FAR)
    here = bytes_of(write(tmp_path, "near"), seq_len=SEQ)

    def make() -> AsyncDataLoader:
        return loader_of(Mixture({"here": (here, 1), "far": (far_away("org/changes"), 1)}))

    with make() as loader:
        next(loader)
        state = loader.state_dict()
    repository.commit({"data/2.parquet": parquet(["something else"] * 24)})
    with pytest.raises(SourceChanged, match=r"2\.parquet changed: its ETag was"):
        make().load_state_dict(state)


class Named:
    """Rows of a dataset that tells its data apart by a name."""

    seq_len = SEQ

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.full(SEQ + 1, index)

    def data_id(self) -> dict[str, Any]:
        return {"name": self.name}


@pytest.mark.parametrize("mixed", [False, True])
def test_data_that_goes_by_a_name_is_not_taken_for_another(mixed: bool) -> None:
    def make(name: str) -> AsyncDataLoader:
        data: Any = Mixture({"a": (Named(name), 1)}) if mixed else Named(name)
        return AsyncDataLoader(data, batch_size=4, n_workers=0)

    with make("first") as loader:
        next(loader)
        state = loader.state_dict()
    make("first").load_state_dict(state)
    with pytest.raises(StateMismatch, match="name was 'first', is 'second'"):
        make("second").load_state_dict(state)
