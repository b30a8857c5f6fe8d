"""Options: what they accept, what they refuse, and what derives from them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, RemoteOptions, Shard, TextDataset
from penstock.errors import ConfigError
from penstock.options import LoaderOptions, TextOptions, options_of
from penstock.settings import SETTINGS


def text(**more: Any) -> TextOptions:
    return TextOptions(tokenizer="byte", seq_len=8, **more)


def remote(**table: Any) -> RemoteOptions:
    return RemoteOptions.of(table)


def loader(**more: Any) -> LoaderOptions:
    return LoaderOptions(**{"batch_size": 4, **more})


def test_names_from_elsewhere_are_accepted_or_answered(corpus: Path) -> None:
    data = TextDataset(
        corpus / "docs.jsonl", tokenizer="byte", block_size=8, split="validation:0.5"
    )
    assert (data.seq_len, data.options.split) == (8, "val:0.5")
    samples = [1, 2, 3, 4]
    with AsyncDataLoader(samples, 2, num_workers=1, collate_fn=sum, shuffle=False) as loader:
        assert next(loader).data == 3
        assert "n_workers=1" in repr(loader)
    for given, says in (
        ({"rank": 1}, r"rank=…: use shard=Shard\(world_size, rank\)"),
        ({"prefetch_factor": 2}, "prefetch_factor=…: use prefetch_size=…"),
        ({"num_workers": 1, "n_workers": 2}, "num_workers=… and n_workers=… are the same"),
    ):
        with pytest.raises(ConfigError, match=says):
            AsyncDataLoader(samples, 2, **given)


@pytest.mark.parametrize(
    ("make", "wrong", "says"),
    [
        (loader, {"n_workers": -1}, "n_workers=-1: must be an integer ≥ 0, or 'auto'"),
        (loader, {"batch_size": True}, "batch_size=True: must be an integer ≥ 1"),
        (loader, {"prefetch_size": "car"}, "='car': must be an integer ≥ 1, or 'auto'"),
        (loader, {"shuffle": 2}, "shuffle=2: must be true or false, or 'auto'"),
        (loader, {"shard": (2, 0)}, "shard=(2, 0): must be a Shard, or 'none'"),
        (loader, {"workers": 4}, "workers=4: must be one of 'thread', 'process'"),
        (loader, {"preprocess": 3}, "preprocess=3: must be a function, or 'none'"),
        (loader, {"cpus": "one"}, "cpus='one': must be CPU numbers"),
        (loader, {"warmup_timeout": float("inf")}, "warmup_timeout=inf: must be a number ≥ 0"),
        (text, {"eos": 1.5}, "eos=1.5: must be text, or an integer, or 'none'"),
        (text, {"chunk_bytes": 1}, "must be an integer ≥ 1024 (or a size such as 512MiB)"),
        (text, {"transform": len}, "must be (name, function), or 'none'"),
        (text, {"skip": [("a.jsonl", None)]}, "must be spans, or addresses of documents"),
        (text, {"on_bad_record": "quarantine"}, "on_bad_record='quarantine'"),
        (text, {"cache": 2}, "cache=2: must be true or false, or 'auto'"),
        (remote, {"fetch": 1}, "remote={'fetch': 1}: must be RemoteOptions"),
        (remote, {"fetches": 0}, "fetches=0: must be an integer ≥ 1"),
        (RemoteOptions, {"retry_budget": 0}, "retry_budget=0: must be a number ≥ 0.001"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_would(
    make: Any, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**wrong)
    assert says in str(caught.value)


def test_an_unknown_argument_is_answered_with_the_nearest_one(corpus: Path) -> None:
    given: dict[str, Any] = {"tokenizer": "byte", "seq_len": 8}
    with pytest.raises(ConfigError, match=r"shuffle_chunk=…: unknown; did you mean shuffle_chunks"):
        TextDataset(str(corpus), shuffle_chunk=2, **given)
    with pytest.raises(ConfigError, match=r"batchsize=…: unknown; did you mean batch_size\?"):
        AsyncDataLoader(TextDataset(str(corpus), **given), batchsize=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"quarantine=…: unknown; known are"):
        TextDataset.from_iterable(["a"], quarantine=1, **given)


def test_values_are_normalised() -> None:
    made = loader(batch_size=np.int64(4), cpus=[2, 0, 2], warmup_timeout=3, shard=Shard(2, 1))
    assert (type(made.batch_size), made.cpus) == (int, (2, 0, 2))
    assert (type(made.warmup_timeout), made.shard) == (float, Shard(2, 1))
    assert remote(cache_bytes="2GiB") == RemoteOptions(cache_bytes=2 << 30)
    made = loader(batch_size="4", n_workers="auto", shuffle="off", cpus="0-2,4", workers="Thread")
    assert made == loader(shuffle=False, cpus=(0, 1, 2, 4))


def test_signatures_and_docs_derive_from_the_options() -> None:
    for owner, cls, first in (
        (AsyncDataLoader, LoaderOptions, "dataset"),
        (TextDataset, TextOptions, "urls"),
    ):
        parameters = inspect.signature(owner).parameters
        assert list(parameters) == [first, *options_of(cls)]
        assert len(parameters) <= 20
        doc = " ".join((owner.__init__.__doc__ or "").split())
        for name, each in options_of(cls).items():
            assert f"{name}: {each.help}" in doc
    positional = [
        name
        for name, each in inspect.signature(AsyncDataLoader).parameters.items()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    assert positional == [
        "dataset", "batch_size", "shuffle", "seed", "n_workers", "prefetch_size", "device",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "batch_size"])
def test_a_default_that_is_shown_can_be_read_back(name: str) -> None:
    each = SETTINGS[name]
    assert each.read(each.show(each.default), "here") == each.default
