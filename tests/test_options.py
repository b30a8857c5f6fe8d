"""Options: what they accept, what they refuse, and what derives from them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, RemoteOptions, Shard, TextDataset
from penstock.errors import ConfigError
from penstock.options import LoaderOptions, TextOptions, options_of
from penstock.settings import SETTINGS

CLASSES = (LoaderOptions, TextOptions, RemoteOptions)


def text(**more: Any) -> TextOptions:
    return TextOptions(tokenizer="byte", seq_len=8, **more)


def remote(**table: Any) -> RemoteOptions:
    return RemoteOptions.of(table)


def loader(**more: Any) -> LoaderOptions:
    return LoaderOptions(**{"batch_size": 4, **more})


@pytest.mark.parametrize(
    ("make", "wrong", "says"),
    [
        (loader, {"n_workers": -1}, "n_workers=-1: must be an integer ≥ 0, or 'auto'"),
        (loader, {"batch_size": True}, "batch_size=True: must be an integer ≥ 1"),
        (loader, {"batch_size": 2.0}, "batch_size=2.0: must be an integer ≥ 1"),
        (
            loader,
            {"prefetch_size": "car"},
            "prefetch_size='car': must be an integer ≥ 1, or 'auto'",
        ),
        (loader, {"shuffle": 2}, "shuffle=2: must be true or false, or 'auto'"),
        (loader, {"shard": (2, 0)}, "shard=(2, 0): must be a Shard, or 'none'"),
        (loader, {"workers": 4}, "workers=4: must be one of 'thread', 'process'"),
        (loader, {"preprocess": 3}, "preprocess=3: must be a function, or 'none'"),
        (loader, {"cpus": "one"}, "cpus='one': must be CPU numbers"),
        (loader, {"warmup_timeout": float("inf")}, "warmup_timeout=inf: must be a number ≥ 0"),
        (text, {"eos": 1.5}, "eos=1.5: must be text, or an integer, or 'none'"),
        (text, {"val_fraction": 1}, "val_fraction=1: must be a number ≥ 1e-09 and < 1"),
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


def test_values_are_normalised() -> None:
    made = loader(batch_size=np.int64(4), cpus=[2, 0, 2], warmup_timeout=3, shard=Shard(2, 1))
    assert (type(made.batch_size), made.cpus) == (int, (2, 0, 2))
    assert (type(made.warmup_timeout), made.shard) == (float, Shard(2, 1))
    assert remote(cache_bytes="2GiB") == RemoteOptions(cache_bytes=2 << 30)
    made = loader(batch_size="4", n_workers="auto", shuffle="off", cpus="0-2,4", workers="Thread")
    assert made == loader(shuffle=False, cpus=(0, 1, 2, 4))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_says_what_it_does(cls: type) -> None:
    for name, each in options_of(cls).items():
        assert each.help.endswith("."), name
        assert len(each.help) > 15, name


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


def test_type_checkers_see_the_exact_signature(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    code = tmp_path / "use.py"
    code.write_text(
        "from penstock import AsyncDataLoader, TextDataset\n"
        "data = TextDataset('x', tokenizer='byte', seq_len=8)\n"
        "AsyncDataLoader(data, 4, True, n_workers=2)\n"
        "AsyncDataLoader(data, 4, n_worker=2)\n"
        "AsyncDataLoader(data)\n"
        "TextDataset('x', tokenizer='byte', seq_len='8')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports",
         "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(code)],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    wrong = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert wrong == ["4", "5", "6"], done.stdout + done.stderr


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_default_that_is_shown_can_be_read_back(name: str) -> None:
    each = SETTINGS[name]
    default = None if name == "batch_size" else each.default
    if name == "batch_size":
        return
    assert each.read(each.show(default), "here") == default
