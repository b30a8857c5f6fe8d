"""Batches on a device: the real path with the CPU as the device, and CUDA on a stand-in for torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import AsyncDataLoader, Batch, ConfigError, SyntheticDataset
from penstock.encode.collate import pad_with
from penstock.feed import cuda
from tests import contracts
from tests.kinds import KINDS


@pytest.fixture(autouse=True)
def cpu_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usually `device="cpu"` means no device; here it is one whose memory happens to be the host's."""
    monkeypatch.setattr("penstock.settings._device", lambda device: device)


def synthetic() -> SyntheticDataset:
    return SyntheticDataset(vocab_size=200_000, seq_len=8, num_samples=50)


# Through the loader


COPIED = "parquet concat shuffled, parquet best_fit, tokens, synthetic, records, mixture restart"


@pytest.mark.parametrize("name", COPIED.split(", "))
def test_batches_on_the_device_equal_batches_on_the_host(name: str, corpus: Path) -> None:
    make = KINDS[name].maker(corpus)
    contracts.same_for_any(make, 20, [{}, {"device": "cpu"}, {"device": "cpu", "n_workers": 0}])


def test_a_stream_on_a_device_resumes_and_closes(corpus: Path) -> None:
    make = KINDS["parquet best_fit"].maker(corpus, device="cpu", epochs=1)
    contracts.resumes_everywhere(make, 12, every=3)
    contracts.closes_cleanly(make)


def test_tensors_of_every_type_are_copied_once() -> None:
    samples = [
        {
            "input_ids": np.arange(n + 2),
            "mask": np.array([n % 2 == 0] * 3),
            "half": torch.full((2,), float(n), dtype=torch.bfloat16),
            "name": f"sample {n}",
        }
        for n in range(8)
    ]
    loaders = [AsyncDataLoader(samples, 4, collate=pad_with(0), device=d) for d in (None, "cpu")]
    here, there = map(next, loaders)
    for loader in loaders:
        loader.shutdown()
    assert here["name"] == there["name"]
    assert all(torch.equal(here[key], there[key]) for key in ("input_ids", "mask", "half"))
    assert there.inputs is there["input_ids"]
    assert there.inputs.dtype == torch.int64
    assert there.inputs.is_contiguous()


def test_device_preprocess_changes_or_replaces_batches_in_their_place() -> None:
    def change(batch: Batch) -> None:
        batch.inputs = batch.inputs * 2

    def replace(batch: Batch) -> Batch:
        return Batch(batch.inputs * 2, batch.targets, epoch=batch.epoch, index=-1)

    for hook in (change, replace):
        with (
            AsyncDataLoader(synthetic(), 4) as plain,
            AsyncDataLoader(synthetic(), 4, device="cpu", device_preprocess=hook) as doubled,
        ):
            for _ in range(10):
                a, b = next(plain), next(doubled)
                assert (a.index, a.tokens, a.state_dict()) == (b.index, b.tokens, b.state_dict())
                assert doubled.state_dict() == b.state_dict()
                assert torch.equal(a.inputs * 2, b.inputs)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"device": "warp"}, r"device='warp' cannot be used.*CUDA devices"),
        ({"device": "cpu", "device_preprocess": str}, "device_preprocess returned str"),
        ({"device_preprocess": str}, "device_preprocess=…: needs device"),
    ],
)
def test_what_cannot_be_used_is_refused(how: dict[str, Any], message: str) -> None:
    for _ in range(2):
        with (
            pytest.raises(ConfigError, match=message),
            AsyncDataLoader(synthetic(), 4, **how) as loader,
        ):
            next(loader)


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


def test_cuda_copies_ahead_from_pinned_memory_on_its_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, host = FakeCuda(), torch.device("cpu")
    monkeypatch.setattr(cuda, "cuda", fake)
    copier: Any = cuda.CudaCopier(torch.device("cuda"))
    copier._device = host  # where tensors can be made on this machine
    monkeypatch.setattr("penstock.feed.device.open_copier", lambda device: copier)

    def log(what: str, result: Any = None) -> Any:
        fake.calls.append(f"{fake.now.name}: {what}")
        return result

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_blocking"):
            return log("copy", real(tensor, host))
        return real(tensor, *args, **kwargs)

    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: log("pin", t))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: log(f"keep for {s.name}"))
    copied = ["copy: pin", "copy: copy", "copy: hook", "copy: record"]
    given = ["trainer: wait for event", "trainer: keep for trainer", "trainer: keep for trainer"]
    with AsyncDataLoader(
        synthetic(), 4, n_workers=1, device="cuda", device_preprocess=lambda batch: log("hook")
    ) as loader:
        loader.warmup(timeout=contracts.TIMEOUT_S)
        next(loader)
        assert fake.calls == ["copy: wait for trainer", *copied * 3, *given]
        fake.calls.clear()
        loader.warmup(timeout=contracts.TIMEOUT_S)
        next(loader)
        assert fake.calls == [*copied, *given]
    assert copier.waited_s() == 1.0
