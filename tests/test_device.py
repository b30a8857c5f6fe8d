"""Batches on a device: the real path with the CPU as the device, and CUDA's part on a stand-in for torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    AsyncDataLoader,
    Batch,
    ConfigError,
    Mixture,
    SyntheticDataset,
    TextDataset,
    TokenFileDataset,
)
from penstock.encode.collate import pad_with
from penstock.feed import cuda
from penstock.feed.device import DeviceFeed
from penstock.watch.stage_timer import NullClock
from tests import contracts


@pytest.fixture(autouse=True)
def cpu_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="cpu"` means no device; here it is one whose memory happens to be the host's."""
    monkeypatch.setattr("penstock.settings._device", lambda device: device)


class Samples:
    """Mappings with fields of every kind."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return {
            "input_ids": np.arange(index % 5 + 2),
            "labels": np.arange(index % 5 + 2),
            "weight": np.float32(index / 7),
            "mask": np.array([index % 2 == 0] * 3),
            "image": torch.full((2, 2), float(index)),
            "half": torch.full((2,), float(index), dtype=torch.bfloat16),
            "name": f"sample {index}",
        }


def data(kind: str, corpus: Path, folder: Path) -> Any:
    options: dict[str, Any] = {
        "tokenizer": str(corpus / "tokenizer.json"),
        "seq_len": 32,
        "chunk_bytes": 4096,
    }
    ids = folder / "ids.bin"
    (np.arange(5000) * 13 % 65_000).astype(np.uint16).tofile(ids)
    tokens = TokenFileDataset.from_binary_file(ids, seq_len=32)
    text = TextDataset(corpus / "docs.jsonl", **options)
    return {
        "text": text,
        "best_fit": TextDataset(
            corpus / "docs.jsonl", packing="best_fit", positions=True, **options
        ),
        "tokens": tokens,
        "synthetic": SyntheticDataset(vocab_size=200_000, seq_len=32, num_samples=100),
        "samples": Samples(),
        "mixture": Mixture({"a": (text, 1), "b": (tokens, 1)}),
    }[kind]


def synthetic() -> SyntheticDataset:
    return SyntheticDataset(vocab_size=100, seq_len=8, num_samples=50)


# Through the loader


@pytest.mark.parametrize("kind", ["text", "best_fit", "tokens", "synthetic", "samples", "mixture"])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_batches_on_the_device_equal_batches_on_the_host(
    kind: str, n_workers: int, corpus: Path, tmp_path: Path
) -> None:
    made = data(kind, corpus, tmp_path)
    how: dict[str, Any] = {
        "batch_size": 4,
        "seed": 1,
        "n_workers": n_workers,
        "collate": pad_with(0) if kind == "samples" else None,
    }
    with AsyncDataLoader(made, **how) as here, AsyncDataLoader(made, device="cpu", **how) as there:
        for _ in range(20):
            a, b = next(here), next(there)
            assert a.state_dict() == b.state_dict() == there.state_dict()
            for name in ("inputs", "targets"):
                assert getattr(b, name).dtype == torch.int64
                assert getattr(b, name).is_contiguous()
            if kind != "samples":
                assert contracts.digest(a) == contracts.digest(b)
                continue
            assert b["name"] == a["name"]
            for key in ("input_ids", "labels", "weight", "mask", "image", "half"):
                assert torch.equal(a[key], b[key])
            assert b.inputs is b["input_ids"], "it is copied once"


def test_a_stream_on_a_device_resumes_and_closes(corpus: Path, tmp_path: Path) -> None:
    made = data("best_fit", corpus, tmp_path)

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(
            made, **{"batch_size": 4, "n_workers": 2, "device": "cpu", "epochs": 1, **how}
        )

    contracts.resumes_everywhere(make, 12, every=3)
    contracts.closes_cleanly(make)
    contracts.same_for_any(make, 100, [{}, {"device": None}, {"n_workers": 0}])


def test_device_preprocess_changes_batches_in_place() -> None:
    def double(batch: Batch) -> None:
        batch.inputs = batch.inputs * 2

    with (
        AsyncDataLoader(synthetic(), 4) as plain,
        AsyncDataLoader(synthetic(), 4, device="cpu", device_preprocess=double) as doubled,
    ):
        for _ in range(10):
            assert torch.equal(next(plain).inputs * 2, next(doubled).inputs)


def test_a_batch_made_by_device_preprocess_keeps_its_place_in_the_stream() -> None:
    def remake(batch: Batch) -> Batch:
        return Batch(batch.inputs + 1, batch.targets, epoch=batch.epoch, index=-1)

    with (
        AsyncDataLoader(synthetic(), 4) as plain,
        AsyncDataLoader(synthetic(), 4, device="cpu", device_preprocess=remake) as remade,
    ):
        for _ in range(10):
            a, b = next(plain), next(remade)
            assert (a.index, a.tokens, a.state_dict()) == (b.index, b.tokens, b.state_dict())
            assert remade.state_dict() == b.state_dict()
            assert torch.equal(a.inputs + 1, b.inputs)


def test_what_cannot_be_used_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device": "warp"}, r"device='warp' cannot be used.*CUDA devices"),
        ({"device": "cpu", "device_preprocess": str}, "device_preprocess returned str"),
    ]
    for how, message in cases:
        loader = AsyncDataLoader(synthetic(), 4, **how)
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                next(loader)
        loader.shutdown()
    with pytest.raises(ConfigError, match="device_preprocess"):
        AsyncDataLoader(synthetic(), 4, device_preprocess=lambda batch: None)


# The ring, on a device that logs what it is asked


class Stream:
    """Batches of the numbers 0, 1, …"""

    def __init__(self, n: int) -> None:
        self.items = [Batch(None, None, 0, i, narrow={"ids": np.full((1, 3), i)}) for i in range(n)]

    def take(self, timeout: float | None = None) -> Batch | None:
        return self.items.pop(0) if self.items else None

    poll = take


def number(batch: Batch | None) -> int:
    assert batch is not None
    return int(batch.inputs[0, 0])


# CUDA, on a stand-in that records the calls


class FakeCuda:
    """The parts of torch.cuda that are used. Events occur at once, 500 ms apart."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = FakeStream(self, "trainer")
        self.Stream = lambda device: FakeStream(self, "copy")
        self.Event = lambda enable_timing=False: FakeEvent(self, enable_timing)

    def current_device(self) -> int:
        return 1

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class FakeEvent:
    def __init__(self, cuda: FakeCuda, timing: bool) -> None:
        self.cuda, self.timing = cuda, timing

    def record(self, stream: FakeStream) -> None:
        if not self.timing:
            self.cuda.calls.append(f"{stream.name}: record")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 500.0


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append(f"{self.name}: wait for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append(f"{self.name}: wait for event")


def test_cuda_copies_from_pinned_memory_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, host = FakeCuda(), torch.device("cpu")
    monkeypatch.setattr(cuda, "cuda", fake)
    copier: Any = cuda.CudaCopier(torch.device("cuda"))
    copier._device = host  # where tensors can be made on this machine

    def log(what: str, result: Any = None) -> Any:
        fake.calls.append(f"{fake.now.name}: {what}")
        return result

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return log("copy", real(tensor, host)) if kwargs.get("non_blocking") else real(tensor, *args, **kwargs)  # fmt: skip

    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: log("pin", t))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: log(f"keep for {stream.name}")
    )
    stream = Stream(1)
    feed = DeviceFeed(copier, stream.take, stream.poll, lambda batch: log("hook"), NullClock())
    assert number(feed.next()) == 0
    assert fake.calls == [
        "copy: wait for trainer", "copy: pin", "copy: copy", "copy: hook", "copy: record",
        "trainer: wait for event", "trainer: keep for trainer", "trainer: keep for trainer",
    ]  # fmt: skip
    assert feed.waited_s() == 0.5
    assert feed.next() is None
