"""What a run is, from the command line, the environment and a file. Nothing here needs torch."""

from __future__ import annotations

import re
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
    add_implied,
    flag,
    micro_steps,
    parallel,
    resolve,
)

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


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def stdlib(**given: Any) -> tuple[TrainOptions, Settings]:
    overrides = given.pop("overrides", None)
    return resolve(None, {"dataset": "stdlib"} | given, overrides=overrides)


# Where values come from


def test_the_command_line_wins_over_the_environment_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_FWE_Q", "5")
    monkeypatch.setenv("PENSTOCK_N_WORKERS", "2")
    file = write(tmp_path / "run.toml", TOML)
    options, settings = resolve(file, {"steps": "40"}, overrides={"n_workers": "1"})
    assert (options.steps, options.seq_len, options.save_every, options.batch) == (40, 48, 0, 3)
    assert (settings["n_workers"], settings["prefetch_size"], settings["batch_size"]) == (1, 5, 3)


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [("batch", "7", "batch_size"), ("lr", "0.25", "learning_rate"), ("seed", "9", "seed")],
)
def test_an_option_that_is_a_setting_too_has_one_value(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str, setting: str
) -> None:
    monkeypatch.setenv(f"PENSTOCK_{setting.upper()}", "2")
    options, settings = stdlib()
    assert getattr(options, option) == settings[setting] == 2
    options, settings = stdlib(**{option: value})
    assert getattr(options, option) == settings[setting] == float(value)


def test_epochs_replace_the_default_number_of_steps() -> None:
    assert stdlib(overrides={"epochs": "2"})[0].steps is None
    assert stdlib(overrides={"epochs": "2"}, steps="5")[0].steps == 5


def test_documented_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_FWE_WARMUP_BATCHES", "16")
    monkeypatch.setenv("NSA_FWE_WARMUP_TIMEOUT", "5")
    settings = stdlib()[1]
    assert (settings["warmup_batches"], settings["warmup_timeout"]) == (16, 5.0)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    lines = 'dataset = "fineweb_edu_local"\nlocal_path = "docs.jsonl"\ntensorboard = "/board"\n'
    options = resolve(write(tmp_path / "deep" / "run.toml", f"[train]\n{lines}"), {})[0]
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
        ({"ddp": "2"}, "--ddp = '2': must be true or false"),
        ({"loader_timeout": "0"}, "--loader-timeout = '0': must be a number ≥ 0.001"),
        ({"val_fraction": "1"}, "--val-fraction = '1': must be a number"),
        ({"dropout": "1"}, "--dropout = '1': must be a number ≥ 0 and < 1"),
        ({"device": "gpu"}, "--device = 'gpu': must be text that matches auto|cpu|cuda"),
        ({"report": "page.txt"}, "--report = 'page.txt': must be text that matches"),
        ({"step": "3"}, "--step: unknown; did you mean --steps?"),
        ({"overrides": {"n_worker": "3"}}, "did you mean n_workers?"),
        ({"dataset": "fineweb_edu_local"}, "--local-path FILE need each other"),
        ({"local_path": "docs.jsonl"}, "--local-path FILE need each other"),
        ({"dataset": None}, "no data: give --dataset (stdlib needs nothing)"),
        ({"ddp": "0", "fsdp": "1"}, "--ddp 0 and --fsdp contradict each other"),
        ({"global_batch": "8", "accumulate": "2"}, "--global-batch sets --accumulate"),
        (
            {"synthetic_on_fail": "1", "overrides": {"prefetch": "off"}},
            "--synthetic-on-fail needs prefetch=on",
        ),
        (
            {"synthetic_on_fail": "1", "overrides": {"n_workers": "0"}},
            "--synthetic-on-fail needs prefetch=on and at least one worker",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_with_what_would(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        stdlib(**given)


@pytest.mark.parametrize(
    ("lines", "given", "words"),
    [
        ("[train]\nbatch = 3\n", {}, "batch: in a file it is batch_size"),
        ("[train]\nstep = 3\n", {}, "did you mean steps?"),
        (
            '[data]\nkind = "text"\nurls = "x"\ntokenizer = "byte"\nseq_len = 8\n',
            {"seq_len": "16"},
            "--seq-len: set it in [data] of",
        ),
    ],
)
def test_what_does_not_fit_in_a_file_is_refused(
    tmp_path: Path, lines: str, given: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve(write(tmp_path / "run.toml", lines), given)


# How it is written


def test_help_lists_every_option_with_its_default() -> None:
    done = CliRunner().invoke(cli, ["train", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0
    for name, each in OPTIONS.items():
        assert re.search(rf"{flag(name)}\b", done.output), name
        assert each.help.endswith("."), name
        assert each.group
    assert "Maximum gradient norm; 0 disables clipping." in done.output
    assert "docs/" not in done.output
    assert {"--config", "--preset", "--set"} <= set(done.output.split())
    assert re.search(r"--seq-len .*Defaults to 256\.", done.output)


def test_options_that_may_stand_alone_get_their_values() -> None:
    line = ["--resume", "--fsdp", "0", "--report", "--steps", "5", "--synthetic-on-fail"]
    assert add_implied(line) == [
        "--resume", "newest", "--fsdp", "0", "--report", "auto", "--steps", "5", "--synthetic-on-fail", "1",
    ]  # fmt: skip


# What follows from them


@pytest.mark.parametrize(
    ("given", "world", "how"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"ddp": "0"}, 1, "single"),
        ({"ddp": "1"}, 1, "ddp"),
        ({"fsdp": "1"}, 2, "fsdp"),
    ],
)
def test_how_ranks_share_the_work(given: dict[str, str], world: int, how: str) -> None:
    assert parallel(stdlib(**given)[0], world) == how


def test_processes_that_would_each_train_their_own_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ddp 0 with 2 processes: each would train its own"):
        parallel(stdlib(ddp="0")[0], 2)


def test_micro_steps_follow_from_the_global_batch() -> None:
    assert micro_steps(stdlib(accumulate="3")[0], 2) == 3
    options = stdlib(global_batch="24", batch="4")[0]
    assert micro_steps(options, 2) == 3
    with pytest.raises(ConfigError, match="must be a multiple of 20, --batch 4 on 5 ranks"):
        micro_steps(options, 5)
