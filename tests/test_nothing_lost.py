"""Nothing is lost, repeated or stale where something around a stream goes wrong or is unusual."""

from __future__ import annotations

import json
import os
import time
from collections import UserDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock.order.mix import restarted
from penstock.sources.skipped import of_mixture, of_part

from penstock import (
    AsyncDataLoader,
    Batch,
    ConfigError,
    Mixture,
    RemoteOptions,
    SyntheticDataset,
    TextDataset,
)
from penstock.errors import BadRecord, Offline, PeerFailed, SourceChanged, SourceError
from penstock.tools.stage import stage
from penstock.types import Address
from tests.servers import FileServer


def write(path: Path, texts: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def text_of(batches: Iterable[Batch]) -> str:
    """Of byte tokens, the separators left out."""
    return "".join(
        bytes(int(i) for i in row if i < 256).decode() for batch in batches for row in batch.inputs
    )


# Files


@pytest.mark.parametrize("cache", [False, True])
def test_a_file_that_is_gone_is_an_error_and_not_left_out(
    tmp_path: Path, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    files = [
        write(tmp_path / "in" / f"{n}.jsonl", (f"{n} {i} " + "x" * 60 for i in range(40)))
        for n in range(6)
    ]
    data = TextDataset(tmp_path / "in", tokenizer="byte", seq_len=64, cache=cache, chunk_bytes=1024)
    files[3].unlink()
    with (
        AsyncDataLoader(data, 4, epochs=1, n_workers=2, shuffle=False) as loader,
        pytest.raises(FileNotFoundError),
    ):
        for _ in loader:
            pass


def test_a_chunk_that_could_not_be_asked_for_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk elsewhere that does not answer once, while chunks are asked for ahead."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for n in range(6):
        write(tmp_path / "in" / f"{n}.jsonl", (f"{n} {i} " + "x" * 60 for i in range(40)))
    data = TextDataset(tmp_path / "in", tokenizer="byte", seq_len=64, cache=True)
    with AsyncDataLoader(data, 4, epochs=1, n_workers=0, shuffle=False) as whole:
        expected = text_of(whole)
    real, failures = os.stat, ["3.jsonl"]

    def stat(path: Any, **more: Any) -> os.stat_result:
        if failures and str(path).endswith(failures[0]):
            failures.clear()
            raise OSError(116, "Stale file handle")
        return real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr("penstock.sources.text_work.os.stat", stat)
        with AsyncDataLoader(data, 4, epochs=1, n_workers=2, shuffle=False) as loader:
            assert text_of(loader) == expected
    assert not failures, "it did not come to that"


def test_a_file_that_shrinks_is_an_error_and_not_the_end_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", ["y" * 50] * 400)
    data = TextDataset(path, tokenizer="byte", seq_len=50, chunk_bytes=1024)
    size = path.stat().st_size
    os.truncate(path, size // 3 // 63 * 63)
    with (
        AsyncDataLoader(data, 4, epochs=1, n_workers=1) as loader,
        pytest.raises(SourceChanged, match=f"it was {size} bytes long when it was listed"),
    ):
        for _ in loader:
            pass


def test_a_file_that_grows_is_read_as_far_as_it_was_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", ["y" * 50] * 40)
    data = TextDataset(path, tokenizer="byte", seq_len=50)
    with path.open("a") as more:
        more.write(json.dumps({"text": "z" * 50}) + "\n")
    with AsyncDataLoader(data, 4, epochs=1, n_workers=1) as loader:
        assert set(text_of(loader)) == {"y"}


# Tokens that are kept


def first_text(url: str) -> tuple[str, int]:
    data = TextDataset(url, tokenizer="byte", seq_len=8)
    with AsyncDataLoader(data, 1, epochs=1, n_workers=1) as loader:
        text = text_of(loader)
        return text[:5], loader.stats().cache_hits


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.txt"])
@pytest.mark.parametrize("dates", [True, False])
def test_without_etags_other_content_of_the_same_size_is_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dates: bool, name: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = tmp_path / name
    kept = []
    with FileServer(etags=False, dates=dates) as server:
        for word, at in (
            ("right", 1_700_000_000),
            ("right", 1_700_000_000),
            ("wrong", 1_700_000_100),
        ):
            write(path, [f"{word} {i:03}" for i in range(50)]) if name.endswith(
                "l"
            ) else path.write_text(word * 50)
            os.utime(path, (at, at))
            server.put(name, path)
            text, hits = first_text(server.url_of(name))
            assert text == word
            kept.append(hits > 0)
    assert kept == [False, dates, False], "what has a date is kept, and known by it"


def test_a_file_whose_date_changes_during_a_run_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "docs.jsonl", (f"right {i:05}" for i in range(2000)))
    with FileServer(etags=False) as server:
        server.put("docs.jsonl", path)
        remote = RemoteOptions(retry_budget=2.0)
        data = TextDataset(
            server.url_of("docs.jsonl"),
            tokenizer="byte",
            seq_len=8,
            chunk_bytes=4096,
            remote=remote,
        )
        with AsyncDataLoader(data, 1, epochs=1, n_workers=0) as loader:
            next(loader)
            write(path, (f"wrong {i:05}" for i in range(2000)))
            os.utime(path, (1_700_000_000, 1_700_000_000))
            server.put("docs.jsonl", path)
            with pytest.raises(
                SourceChanged, match=r"its date was .* it is Tue 14 Nov 2023 22:13:20 GMT"
            ):
                for _ in loader:
                    pass


def test_an_answer_about_one_query_is_none_about_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "docs.jsonl", ["text"] * 50)
    with FileServer({"docs.jsonl": path}) as server:
        url = server.url_of("docs.jsonl")
        TextDataset(f"{url}?v=1", tokenizer="byte", seq_len=8)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        TextDataset(f"{url}?v=1", tokenizer="byte", seq_len=8)
        with pytest.raises(Offline):
            TextDataset(f"{url}?v=2", tokenizer="byte", seq_len=8)


def test_what_cannot_be_told_apart_cannot_be_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "docs.jsonl", ["text"] * 50)
    with FileServer({"docs.jsonl": path}, etags=False, dates=False) as server:
        data = TextDataset(server.url_of("docs.jsonl"), tokenizer="byte", seq_len=8, cache=True)
        with pytest.raises(SourceError, match="neither an ETag nor a date"):
            stage(AsyncDataLoader(data, 1, n_workers=1), 1 << 20)


# Mixtures


def test_a_document_that_one_part_leaves_out_is_not_left_out_of_another(tmp_path: Path) -> None:
    parts = {
        name: write(
            tmp_path / name / "data.jsonl", (f"{name} doc{k:03} " + "x" * 60 for k in range(20))
        ).parent
        for name in "ab"
    }
    a = TextDataset(parts["a"], tokenizer="byte", seq_len=16, skip=[("data.jsonl", None, 0)])
    b = TextDataset(parts["b"], tokenizer="byte", seq_len=16)

    def loader() -> AsyncDataLoader:
        mixture = Mixture({"a": (a, 0.5), "b": (b, 0.5)}, on_end="leave")
        return AsyncDataLoader(mixture, 1, epochs=1, n_workers=1)

    with loader() as first:
        batches = [next(first) for _ in range(3)]
        state = json.loads(json.dumps(first.state_dict()))
        text = text_of([*batches, *first])
    with loader() as again:
        again.load_state_dict(state)
        assert text.endswith(text_of(again))
    assert "a doc000" not in text
    assert "a doc001" in text
    assert "b doc000" in text


def test_addresses_of_a_mixture_name_their_part() -> None:
    one, two = Address("data.jsonl", None, 0), Address("data.jsonl", 3, 7)
    all_of_them = of_mixture({"web": {one}, "code": {two}})
    assert of_part(all_of_them, "web", ("web", "code")) == {one}
    assert of_part(all_of_them, "code", ("web", "code")) == {two}
    odd = of_mixture({"a": {Address("b::f", None, 0)}, "a::b": {one}})
    assert of_part(odd, "a::b", ("a", "a::b")) >= {one}
    assert one not in of_part(odd, "a", ("a", "a::b"))
    assert (
        of_part({one}, "web", ("web", "code")) == of_part({one}, "code", ("web", "code")) == {one}
    ), "an older state's"


def test_weights_that_were_planned_beyond_a_pass_hold_in_the_next_and_its_state_loads() -> None:
    def loader() -> AsyncDataLoader:
        parts = {
            "a": (SyntheticDataset(100, 8, 7, seed=1), 0.5),
            "b": (SyntheticDataset(100, 8, 8, seed=2), 0.5),
        }
        return AsyncDataLoader(Mixture(parts, on_end="leave"), 1, epochs=1, lanes=2, n_workers=0)

    with loader() as first:
        next(first)
        first.set_weights({"a": 0.9, "b": 0.1}, step=30)
        assert 1 + sum(1 for _ in first) == 15
        rest = [batch.inputs.tolist() for batch in first][0:3]
    with loader() as first:
        next(first)
        first.set_weights({"a": 0.9, "b": 0.1}, step=30)
        for _ in first:
            pass
        iter(first)
        next(first)
        state = first.state_dict()
    with loader() as again:
        again.load_state_dict(state)
        assert [next(again).inputs.tolist() for _ in range(2)] == rest[1:]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_weights_of_a_next_pass_change_between_two_rounds_of_lanes(lanes: int) -> None:
    schedule = ((0, (1,)), (30, (2,)), (31, (3,)))
    made = restarted(schedule, 15, lanes)
    assert made[0] == (0, (1,))
    assert all(row % lanes == 0 for row, _ in made)
    assert [row for row, _ in made] == sorted({row for row, _ in made})
    assert made[-1] == (-(-16 // lanes) * lanes, (3,))


# Lanes


@pytest.mark.parametrize(("n_workers", "prefetch_size"), [(0, 8), (1, 1), (1, 8), (1, 64)])
def test_as_many_batches_come_before_an_error_however_many_are_made_at_once(
    tmp_path: Path, n_workers: int, prefetch_size: int
) -> None:
    """One of two lanes has come to its end when the other fails."""
    for n in range(16):
        path = write(tmp_path / f"{n:02}.jsonl", ["x" * 59] * (3 if n % 2 else 40))
        if n == 14:
            path.write_text(path.read_text() + "broken\n")
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=60, chunk_bytes=1024)
    how: dict[str, Any] = {
        "n_workers": n_workers,
        "prefetch_size": prefetch_size,
    }
    given: list[int] = []
    with AsyncDataLoader(data, 4, epochs=1, lanes=2, **how) as loader, pytest.raises(BadRecord):
        given.extend(batch.index for batch in loader)
    assert given == list(range(83))


@pytest.mark.parametrize("prefetch_size", [1, 8, 64])
def test_a_stream_that_ends_with_its_first_lane_does_not_meet_a_fault_beyond_that(
    tmp_path: Path, prefetch_size: int
) -> None:
    """The short lane is over some rows before the other comes to the record that is broken; many are made at once."""
    for n in range(16):
        path = write(tmp_path / f"{n:02}.jsonl", ["x" * 59] * (3 if n % 2 else 28))
        if n == 2:
            path.write_text("broken\n")
    data = TextDataset(tmp_path, tokenizer="byte", seq_len=60)
    given = []
    for n_workers in (0, 1):
        how: dict[str, Any] = {
            "n_workers": n_workers,
            "prefetch_size": prefetch_size,
        }
        with AsyncDataLoader(data, 4, epochs=1, lanes=2, drop_last=True, **how) as loader:
            given.append([batch.index for batch in loader])
    assert given[0] == given[1] == list(range(len(given[0])))
    assert len(given[0]) > 5


# Batches


class Samples:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[int]:
        return [index, index + 1, index + 2]


def test_a_batch_that_a_device_hook_makes_takes_the_place_of_the_one_it_was_given() -> None:
    def other(batch: Batch) -> Batch:
        return Batch(batch.inputs, batch.targets, batch.epoch, 0)

    data = SyntheticDataset(100, 8, 50)
    with AsyncDataLoader(data, 4, device="meta", device_preprocess=other, n_workers=1) as loader:
        batches = [next(loader) for _ in range(5)]
        state = loader.state_dict()
        assert [batch.index for batch in batches] == [0, 1, 2, 3, 4]
        assert (state["batch"], state["row"]) == (5, 20)
        assert batches[-1].state_dict() == state
        assert loader.stats().tokens == 5 * 4 * 8


def test_a_device_hook_that_gives_something_else_is_told_so() -> None:
    hook: Any = lambda batch: batch.inputs  # noqa: E731
    with (
        AsyncDataLoader(
            SyntheticDataset(100, 8, 50), 4, device="meta", device_preprocess=hook, n_workers=1
        ) as loader,
        pytest.raises(ConfigError, match="device_preprocess gave Tensor: needs a Batch, or None"),
    ):
        next(loader)


def test_every_field_of_a_mapping_that_is_no_dict_goes_to_the_device() -> None:
    import torch

    def collate(samples: Sequence[Any]) -> UserDict[str, Any]:
        ids = torch.tensor(samples)
        return UserDict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)

    with AsyncDataLoader(Samples(), 4, device="meta", collate=collate, n_workers=1) as loader:
        batch = next(loader)
        assert {
            batch.inputs.device.type,
            batch["input_ids"].device.type,
            batch["attention_mask"].device.type,
        } == {"meta"}
    with AsyncDataLoader(Samples(), 4, collate=collate, n_workers=1) as loader:
        batch = next(loader)
        assert batch.nbytes == 3 * np.asarray(batch["labels"]).nbytes


class Once:
    """Ranks that agree on everything but once."""

    def __init__(self) -> None:
        self._left = 3

    def next(self, take: Any) -> Any:
        batch = take()
        self._left -= 1
        if not self._left:
            raise PeerFailed("another rank failed")
        return batch


def test_a_batch_that_was_taken_when_a_peer_failed_is_given_again() -> None:
    with AsyncDataLoader(SyntheticDataset(100, 8, 40), 2, shuffle=False, n_workers=1) as loader:
        loader._agreement = Once()  # type: ignore[assignment]
        assert [next(loader).index for _ in range(2)] == [0, 1]
        with pytest.raises(PeerFailed):
            next(loader)
        assert [next(loader).index for _ in range(3)] == [2, 3, 4]
        assert loader.state_dict()["batch"] == 5


# Small things


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_a_batch_may_be_waited_for_as_long_as_you_like(timeout: float) -> None:
    class Slow(Samples):
        def __getitem__(self, index: int) -> list[int]:
            time.sleep(0.02)
            return [index, index]

    with AsyncDataLoader(Slow(), 2, n_workers=1) as loader:
        assert [loader.next_batch(timeout=timeout) is not None for _ in range(3)] == [True] * 3


def test_a_loader_is_true_also_where_it_has_no_length() -> None:
    with AsyncDataLoader(SyntheticDataset(100, 8, 40), 2) as loader:
        assert loader
        assert loader.as_torch_dataset()
