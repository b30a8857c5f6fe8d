"""What a run is, put together from the command line, the environment and a file. Nothing here needs torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import cli
from penstock.errors import ConfigError
from penstock.settings import Settings
from penstock.train.options import (
    OPTIONS,
    TrainOptions,
    parallel,
    resolve,
    spelled,
)
from penstock.train.trainer import _accumulate

TOML = """
[loader]
batch_size = 3
n_workers = 3
prefetch_size = 3

[train]
dataset = "stdlib"
steps = 30
seq_len = 48
"""


@pytest.fixture(autouse=True)
def no_settings_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def stdlib(**given: Any) -> tuple[TrainOptions, Settings]:
    overrides = given.pop("overrides", None)
    return resolve(None, {"dataset": "stdlib"} | given, overrides=overrides)


# Where values come from


def test_without_anything_said_the_defaults_hold() -> None:
    options, resolved = stdlib()
    assert options == TrainOptions(dataset="stdlib")
    assert (options.seq_len, options.tokenizer, options.loader_timeout) == (256, "byte", 60.0)
    assert resolved["batch_size"] is None
    assert (resolved["prefetch_size"], resolved["warmup_batches"]) == (8, 0)


def test_the_command_line_wins_over_the_environment_over_the_file_over_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_FWE_Q", "5")
    monkeypatch.setenv("PENSTOCK_N_WORKERS", "2")
    given = {"steps": "40"}
    options, resolved = resolve(file, given, overrides={"n_workers": "1"})
    settings = resolved
    assert (options.steps, options.seq_len, options.save_every) == (40, 48, 0)
    assert (settings["n_workers"], settings["prefetch_size"], settings["batch_size"]) == (1, 5, 3)
    assert settings["warmup_batches"] == 0


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [("batch", "7", "batch_size"), ("lr", "0.25", "learning_rate"), ("seed", "9", "seed")],
)
def test_an_option_that_is_the_loaders_too_wins_everywhere(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str, setting: str
) -> None:
    monkeypatch.setenv(f"PENSTOCK_{setting.upper()}", "2")
    assert stdlib()[1][setting] == 2
    assert stdlib(**{option: value})[1][setting] == float(value)


def test_the_environment_of_runbooks_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_FWE_WARMUP_BATCHES", "16")
    monkeypatch.setenv("NSA_FWE_WARMUP_TIMEOUT", "5")
    settings = stdlib()[1]
    assert (settings["warmup_batches"], settings["warmup_timeout"]) == (16, 5.0)


def test_the_file_in_the_working_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(TOML)
    assert resolve(None, {})[0].steps == 30


def test_a_local_path_in_a_file_is_found_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "run.toml"
    file.write_text(
        '[train]\ndataset = "fineweb_edu_local"\nlocal_path = "docs.jsonl"\ntensorboard = "/board"\n'
    )
    options = resolve(file, {})[0]
    assert options.local_path == tmp_path / "deep" / "docs.jsonl"
    assert options.tensorboard == Path("/board")


# What is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": "0"}, "--steps = '0': must be an integer ≥ 1"),
        ({"steps": "many"}, "--steps = 'many': must be an integer"),
        ({"seq_len": "4"}, "--seq-len = '4': must be an integer ≥ 8"),
        ({"size": "huge"}, "--size = 'huge': must be one of 'toy', 'mini'"),
        ({"packing": "tight"}, "--packing = 'tight': must be one of 'concat', 'best_fit', 'bos'"),
        ({"dtype": "float16"}, "--dtype = 'float16': must be one of"),
        ({"ddp": "2"}, "--ddp = '2': must be true or false"),
        ({"compile": "maybe"}, "--compile = 'maybe': must be true or false"),
        (
            {"loader_timeout": "-1"},
            "--loader-timeout = '-1': must be a number ≥ 0",
        ),
        ({"on_stall": "wait"}, "--on-stall = 'wait': must be one of 'stop', 'synthetic'"),
        ({"lr": "fast"}, "--lr = 'fast': must be a number"),
        ({"tokenizer": ""}, "--tokenizer = '': must be text"),
        ({"device": "gpu"}, "--device = 'gpu': must be text that matches auto|cpu|cuda"),
        ({"keep": "0"}, "--keep = '0': must be an integer ≥ 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_that_does_not_fit_is_named_with_what_would(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        stdlib(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dataset": "fineweb_edu_local"}, "--dataset fineweb_edu_local: needs --local-path FILE"),
        ({"local_path": "docs.jsonl"}, "--local-path: is for --dataset fineweb_edu_local"),
        ({"dataset": None}, "no data: give --dataset (stdlib needs nothing), or --config"),
        (
            {"ddp": "0", "fsdp": "1"},
            "--ddp 0 and --fsdp: a single process has nobody to share a model with",
        ),
        (
            {"global_batch": "8", "accumulate": "2"},
            "--global-batch and --accumulate: the one follows from the other",
        ),
        ({"val_fraction": "0"}, "--val-fraction 0: needs a share between 0 and 1"),
        ({"val_fraction": "1"}, "--val-fraction 1: needs a share between 0 and 1"),
        ({"dropout": "1"}, "--dropout 1: needs a share below 1"),
        (
            {"loader_timeout": "0"},
            "--loader-timeout, --stall-timeout and --collective-timeout: need more than 0",
        ),
        (
            {"stall_timeout": "0"},
            "--loader-timeout, --stall-timeout and --collective-timeout: need more than 0",
        ),
        (
            {"collective_timeout": "0"},
            "--loader-timeout, --stall-timeout and --collective-timeout: need more than 0",
        ),
        (
            {"on_stall": "synthetic", "overrides": {"prefetch": "off"}},
            "--on-stall synthetic: needs prefetch on",
        ),
        (
            {"synthetic_on_fail": "1", "overrides": {"prefetch": "off"}},
            "--on-stall synthetic: needs prefetch on",
        ),
        (
            {"on_stall": "synthetic", "overrides": {"n_workers": "0"}},
            "--on-stall synthetic: needs prefetch on, and workers",
        ),
        ({"on_stall": "stop", "synthetic_on_fail": "1"}, "are one option, and differ"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        stdlib(**given)


def test_an_option_that_does_not_exist_is_named_with_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"step.*steps"):
        stdlib(step=3)


def test_a_setting_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"n_worker.*n_workers"):
        stdlib(overrides={"n_worker": "3"})
    monkeypatch.setenv("NSA_FWE_QUEUE", "3")
    with pytest.raises(ConfigError, match=r"environment NSA_FWE_QUEUE"):
        stdlib()


def test_on_the_command_line_a_mistake_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "train",
        "--dataset",
        "stdlib",
        "--size",
        "huge",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("penstock: --size = 'huge': must be one of")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# How it is written


def test_help_lists_every_option_with_its_default() -> None:
    done = CliRunner().invoke(cli, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0
    for each in OPTIONS.values():
        assert re.search(rf"--{spelled(each.name)}\b", done.output), each.name
    assert "--config" in done.output
    assert "--set" in done.output
    assert re.search(r"--seq-len .*\[default: \(256\)\]", done.output)


def test_every_option_says_what_it_is_for() -> None:
    for each in OPTIONS.values():
        assert each.help[-1] == ".", each.name
        assert each.group


# What follows from them


@pytest.mark.parametrize(
    ("given", "world", "how"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"ddp": "0"}, 1, "single"),
        ({"ddp": "auto"}, 2, "ddp"),
        ({"ddp": "1"}, 1, "ddp"),
        ({"fsdp": "1"}, 1, "fsdp"),
        ({"fsdp": "1"}, 2, "fsdp"),
    ],
)
def test_how_ranks_share_the_work(given: dict[str, str], world: int, how: str) -> None:
    assert parallel(stdlib(**given)[0], world) == how


def test_processes_that_would_each_train_a_model_of_their_own_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="--ddp 0 with 2 processes: each would train a model of its own"
    ):
        parallel(stdlib(ddp="0")[0], 2)


@pytest.mark.parametrize(
    ("given", "world", "words"),
    [
        ({"global_batch": "5", "batch": "1"}, 2, "--global-batch 5: is no multiple of the 2 ranks"),
        ({"global_batch": "12", "batch": "4"}, 2, "is no multiple of 8, which is --batch 4 on 2 ranks. Use a --batch that divides 6."),
        ({"global_batch": "10", "batch": "4"}, 1, "is no multiple of 4, which is --batch 4 on 1 rank. Use a --batch that divides 10."),
    ],
)  # fmt: skip
def test_a_global_batch_that_cannot_be_shared_out_is_told_what_would_fit(
    given: dict[str, str], world: int, words: str
) -> None:
    options, resolved = stdlib(**given)
    with pytest.raises(ConfigError, match=re.escape(words)):
        _accumulate(options, resolved["batch_size"] or 0, world)


def test_micro_steps_follow_from_the_global_batch() -> None:
    options, _ = stdlib(global_batch="24")
    assert _accumulate(options, 4, 2) == 3
