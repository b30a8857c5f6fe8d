"""Batches on their way to a device are the batches that stay: the real way, with the CPU as the device."""

from __future__ import annotations

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
    Shard,
    SyntheticDataset,
    TextDataset,
    TokenFileDataset,
)
from penstock.encode.collate import pad_with
from tests import contracts


@pytest.fixture(autouse=True)
def cpu_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="cpu"` means no device; here it means one whose memory happens to be the host's."""
    monkeypatch.setattr("penstock.run_options._device", lambda device: device)


class Samples:
    """Mappings with everything that may be in one."""

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
    about: dict[str, Any] = {
        "tokenizer": str(corpus / "tokenizer.json"),
        "seq_len": 32,
        "chunk_bytes": 4096,
    }
    ids = folder / "ids.bin"
    (np.arange(5000) * 13 % 65_000).astype(np.uint16).tofile(ids)
    tokens = TokenFileDataset.from_binary_file(ids, seq_len=32)
    text = TextDataset(corpus / "docs.jsonl", **about)
    return {
        "text": text,
        "best_fit": TextDataset(corpus / "docs.jsonl", packing="best_fit", positions=True, **about),
        "tokens": tokens,
        "synthetic": SyntheticDataset(vocab_size=200_000, seq_len=32, num_samples=100),
        "samples": Samples(),
        "mixture": Mixture({"a": (text, 1), "b": (tokens, 1)}),
    }[kind]


@pytest.mark.parametrize("kind", ["text", "best_fit", "tokens", "synthetic", "samples", "mixture"])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_what_arrives_is_what_would_have_stayed(
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
            if kind != "samples":
                assert contracts.digest(a) == contracts.digest(b)
            assert a.state_dict() == b.state_dict() == there.state_dict()
            for name in ("inputs", "targets"):
                tensor = getattr(b, name)
                assert tensor.dtype == torch.int64
                assert tensor.is_contiguous()
            if kind == "samples":
                assert b["name"] == a["name"]
                assert all(
                    torch.equal(a[key], b[key])
                    for key in ("input_ids", "labels", "weight", "mask", "image", "half")
                )
                assert b.inputs is b["input_ids"]  # it travels once


def test_a_stream_on_a_device_resumes_and_closes_like_any(corpus: Path, tmp_path: Path) -> None:
    made = data("best_fit", corpus, tmp_path)

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(
            made, **{"batch_size": 4, "n_workers": 2, "device": "cpu", "epochs": 1, **how}
        )

    contracts.resumes_everywhere(make, 12, every=3)
    contracts.closes_cleanly(make)
    contracts.same_for_any(make, 100, [{}, {"device": None}, {"n_workers": 0}])


def test_ids_are_narrow_until_they_are_there(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.feed import device

    seen: list[int] = []
    pack = device.Layout.pack

    def spy(self: Any, leaves: Any, into: Any) -> None:
        seen.append(self.nbytes)
        pack(self, leaves, into)

    monkeypatch.setattr(device.Layout, "pack", spy)
    with AsyncDataLoader(data("tokens", corpus, tmp_path), 4, device="cpu") as loader:
        next(loader)
    # 4 rows of 33 ids of 2 bytes, and 4 counts of 4 bytes at the next multiple of 64.
    assert seen[0] == 320 + 16


def test_the_hook_changes_batches_on_the_device() -> None:
    def double(batch: Batch) -> None:
        batch.inputs = batch.inputs * 2

    made = SyntheticDataset(vocab_size=100, seq_len=8, num_samples=50)
    with (
        AsyncDataLoader(made, 4) as plain,
        AsyncDataLoader(made, 4, device="cpu", device_preprocess=double) as doubled,
    ):
        for _ in range(10):
            assert torch.equal(next(plain).inputs * 2, next(doubled).inputs)


def test_a_failing_hook_is_raised_after_the_batches_before_it() -> None:
    def fail(batch: Batch) -> None:
        if batch.index == 3:
            raise RuntimeError("no")

    made = SyntheticDataset(vocab_size=100, seq_len=8, num_samples=50)
    with AsyncDataLoader(made, 4, device="cpu", device_preprocess=fail) as loader:
        with pytest.raises(RuntimeError, match="no") as caught:
            contracts.take(loader, 10)
        assert loader.stats().batches == 3
        assert any("device_preprocess" in note for note in caught.value.__notes__)


def test_an_unknown_device_is_named_with_those_there_are() -> None:
    loader = AsyncDataLoader(SyntheticDataset(num_samples=10), 4, device="warp")
    with pytest.raises(ConfigError, match=r"device='warp' cannot be used.*cpu"):
        next(loader)
    loader.shutdown()


def test_a_hook_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_preprocess"):
        AsyncDataLoader(SyntheticDataset(num_samples=10), 4, device_preprocess=lambda batch: None)


def test_shards_arrive_too(tmp_path: Path, corpus: Path) -> None:
    made = data("tokens", corpus, tmp_path)

    def make(**how: Any) -> AsyncDataLoader:
        return AsyncDataLoader(made, device="cpu", **{"batch_size": 4, "n_workers": 1, **how})

    contracts.same_for_any_world(make, 3, 6, [1, 2, 3])
    with make(shard=Shard(2, 1)) as loader:
        assert len(next(loader).provenance()) == 4
