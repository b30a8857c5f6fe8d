"""What a run does: it learns, gives the same numbers whatever feeds it, evaluates and can be watched."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import AsyncDataLoader
from penstock.errors import ConfigError
from penstock.train.data import TrainData
from penstock.train.model import GPT
from penstock.train.options import resolve
from penstock.train.run import show
from penstock.watch.telemetry import Telemetry
from tests.train.runs import ROOT, SMALL, Child, Run, train, write_texts

IGNORED = -100
"""A target that is none."""
CONFIGS = sorted((ROOT / "configs").iterdir())


def losses(run: Run) -> list[float]:
    return [float(loss) for loss in run.losses().values()]


@pytest.fixture(scope="module")
def base(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that others are compared with."""
    out = tmp_path_factory.mktemp("base") / "out"
    return train(out, "--dataset", docs, *SMALL, "--batch", 4, "--steps", 12).good()


@pytest.fixture(scope="module")
def evaluated(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that evaluates, with a learning rate that moves no weight by a bit."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    how = ("--eval-every", 3, "--eval-batches", 4, "--val-fraction", 0.3, "--lr", 1e-30)
    return train(out, "--dataset", docs, *SMALL, "--steps", 9, *how).good()


def test_the_loss_falls_on_text(docs: Path, tmp_path: Path) -> None:
    how = ("--seq-len", 32, "--batch", 8, "--steps", 50, "--lr", 5e-3)
    told = losses(train(tmp_path / "out", "--dataset", docs, *how).good())
    assert abs(told[0] - math.log(257)) < 0.5  # it begins by knowing nothing
    assert sum(told[-5:]) / 5 < told[0] - 2


@pytest.mark.parametrize(
    "how",
    [
        ("--prewarm",),
        ("--set", "prefetch=off"),
        ("--set", "n_workers=0"),
        ("--set", "n_workers=1"),
        ("--set", "n_workers=2", "--set", "prefetch_size=1"),
        ("--preset", "high-performance"),
        ("--ddp", "1"),
    ],
    ids=" ".join,
)
def test_what_feeds_a_run_changes_no_digit_of_its_losses(
    base: Run, docs: Path, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run = train(
        tmp_path / "out", "--dataset", docs, *SMALL, "--batch", 4, "--steps", 12, *how
    ).good()
    assert run.losses() == base.losses()
    assert bool(run.of("prewarm")) == ("--prewarm" in how)


@pytest.mark.parametrize(
    "how", [("--accumulate", 2), ("--global-batch", 4)], ids=lambda how: how[0]
)
def test_two_micro_steps_are_one_step_of_twice_the_rows(
    base: Run, docs: Path, tmp_path: Path, how: tuple[Any, ...]
) -> None:
    run = train(tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 12, *how).good()
    assert losses(run) == pytest.approx(losses(base), rel=1e-4)
    assert "  Batch size: 4\n" in run.said
    assert run.position() | {"batch": 12} == base.position()


# Rows


def training_loader(config: Path | None = None, **given: Any) -> AsyncDataLoader:
    return TrainData(*resolve(config, given)).loader(Telemetry(), None)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of which no two fill a row."""
    texts = [f"{n} " * (6 + n % 5) for n in range(100, 400)]
    return write_texts(tmp_path_factory.mktemp("lines") / "lines.jsonl", texts)


def test_with_padding_the_loss_is_the_mean_over_what_is_none(lines: Path, tmp_path: Path) -> None:
    run = train(
        tmp_path / "out",
        "--dataset",
        lines,
        *SMALL,
        "--steps",
        30,
        "--packing",
        "best_fit",
        "--lr",
        3e-3,
    )
    with training_loader(dataset=str(lines), seq_len=32, batch=2, packing="best_fit") as loader:
        batch = next(loader)
    padding = batch.targets == IGNORED
    assert 0 < padding.sum() < padding.numel()
    torch.manual_seed(0)
    logits = GPT.from_size("toy", 257, 32)(batch.inputs).detach()
    chosen = torch.log_softmax(logits, -1)[~padding].gather(1, batch.targets[~padding][:, None])
    assert losses(run.good())[0] == pytest.approx(-float(chosen.mean()), rel=1e-5)
    assert losses(run)[-1] < losses(run)[0] - 1


def test_attention_within_documents_gives_other_numbers(lines: Path, tmp_path: Path) -> None:
    how = ("--dataset", lines, *SMALL, "--steps", 3)
    masked = train(tmp_path / "masked" / "out", *how, "--doc-mask").good()
    plain = train(tmp_path / "plain" / "out", *how).good()
    assert all(math.isfinite(loss) for loss in losses(masked))
    assert losses(masked) != losses(plain)
    assert masked.position() == plain.position()


# Evaluating


def test_evaluations_are_told_and_kept_apart_from_steps(evaluated: Run) -> None:
    told = evaluated.of("eval")
    assert [line["step"] for line in told] == [3, 6, 9]
    assert [line["batches"] for line in told] == [4, 4, 4]
    assert len({line["loss"] for line in told}) == 1  # the same documents each time
    for line in told:
        assert (
            f"[train] step {line['step']}: validation loss {line['loss']:.4f}\n" in evaluated.said
        )
    pauses = {
        line["step"]: line["seconds"] for line in evaluated.of("pause") if line["name"] == "eval"
    }
    assert list(pauses) == [3, 6, 9]
    steps = {line["step"]: line for line in evaluated.of("progress")}
    for step in (4, 7):
        between = steps[step]["mono"] - steps[step - 1]["mono"]
        assert steps[step]["dt_step_s"] <= between - pauses[step - 1] + 1e-3


def test_evaluating_changes_no_digit_of_training(
    evaluated: Run, docs: Path, tmp_path: Path
) -> None:
    how = ("--eval-every", 1000, "--val-fraction", 0.3, "--lr", 1e-30)
    run = train(tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 9, *how).good()
    assert not run.of("eval")
    assert run.losses() == evaluated.losses()


def test_no_document_is_both_trained_and_evaluated_on(docs: Path) -> None:
    given = {"dataset": str(docs), "seq_len": 32, "batch": 2, "eval_every": 3, "val_fraction": 0.3}
    data = TrainData(*resolve(None, given))
    seen: list[set[Any]] = []
    for loader in (data.loader(Telemetry(), None), data.validation_loader()):
        seen.append(set())
        with loader:
            for batch in loader:
                if batch.epoch > 0:
                    break
                seen[-1] |= {span.address for row in batch.provenance() for span in row}
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == len(docs.read_text().splitlines())
    assert len(seen[1]) > 5


# Watching


def test_a_run_can_be_scraped_and_leaves_pages_behind(docs: Path, tmp_path: Path) -> None:
    address: list[str] = []
    scraped: list[str] = []

    def scrape(_: str) -> None:
        for _ in range(1000):  # the heartbeat's thread may be a moment behind the console
            with urllib.request.urlopen(address[0], timeout=20) as answer:
                scraped.append(answer.read().decode())
            if "penstock_loss" in scraped[-1]:
                return
            time.sleep(0.02)

    def note(said: str) -> None:
        address.append(said.split(" at ")[1].strip())

    how = ("--metrics-port", 0, "--tensorboard", tmp_path / "board", "--report", "--trace", tmp_path / "t.json")  # fmt: skip
    on = {"metrics at": note, "step 9/": scrape}
    run = train(tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 40, *how, on=on).good()
    assert re.search(r"^penstock_loss\S* [\d.]+$", scraped[-1], re.MULTILINE), scraped[-1]
    assert list((tmp_path / "board").rglob("events.out.tfevents.*"))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    page = run.out / "report.html"
    assert page.stat().st_size > 100_000
    assert f"report: {page}" in run.said


# How it computes


@pytest.mark.slow
def test_compiled_blocks_give_nearly_the_same_losses(base: Run, docs: Path, tmp_path: Path) -> None:
    # In a process of its own: what torch imports to compile warns of itself.
    how = ("--dataset", docs, *SMALL, "--batch", 4, "--steps", 12, "--compile")
    run = Child(tmp_path / "out", *how).end(timeout_s=250).good()
    assert losses(run) == pytest.approx(losses(base), rel=1e-3)
    assert run.of("progress")[-1]["compiles"] > 0


# Files


def test_the_epochs_of_a_file_end_a_run(lines: Path, tmp_path: Path) -> None:
    file = tmp_path / "epochs.toml"
    data = f'[data]\nkind = "text"\nurls = "{lines}"\ntokenizer = "byte"\nseq_len = 32\n'
    file.write_text(f"[training]\nbatch_size = 16\nnum_epochs = 2\n\n{data}")
    run = train(tmp_path / "out", "--config", file).good()
    with training_loader(file) as loader:
        batches = sum(1 for _ in loader)
    assert batches > 20
    assert f"[train] the data ends after step {batches}\n" in run.said
    assert list(run.losses()) == list(range(1, batches + 1))
    assert run.saved().step == batches


def test_documents_of_a_file_are_masked_whatever_kind_of_data_they_are(
    lines: Path, tmp_path: Path
) -> None:
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    text = f'kind = "text"\nurls = "{lines}"\ntokenizer = "byte"\n'
    kinds = {
        "text": f"[data]\nseq_len = 32\n{text}",
        "tokens": '[data]\nseq_len = 32\nkind = "tokens"\npath = "ids.bin"\n',
        "mixture": f"[data]\nseq_len = 32\n[data.mixture.a]\nweight = 1\n{text}"
        '[data.mixture.b]\nweight = 1\nkind = "tokens"\npath = "ids.bin"\n',
    }
    file = tmp_path / "run.toml"
    for kind, data in kinds.items():
        file.write_text(f"[loader]\nbatch_size = 4\n{data}")
        for masked in (True, False):
            with training_loader(file, doc_mask=str(masked)) as loader:
                assert (next(loader).positions is not None) is masked, kind
    synthetic = 'kind = "synthetic"\nvocab_size = 9\nnum_samples = 9\n'
    for data in (
        f"[data]\nseq_len = 32\n{synthetic}",
        f"{kinds['mixture']}[data.mixture.c]\nweight = 1\n{synthetic}",
    ):
        file.write_text(data)
        with pytest.raises(ConfigError, match=r"--doc-mask with file .*: synthetic data has no"):
            training_loader(file, doc_mask="1")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_file_of_configs_trains(file: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "out", "--config", file, "--batch", 1, "--steps", 2).good()
    assert list(run.losses()) == [1, 2]
    assert run.of("boot")[0]["settings"]["loader"]["batch_size"] == 1


# What it says of itself


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("fineweb_edu", "fineweb_loader_"),
        ("hf://datasets/HuggingFaceFW/fineweb-edu@main", "fineweb_loader_"),
        ("hf://datasets/HuggingFaceFW/fineweb-edu-score-2", "loader_"),
        ("s3://bucket/fineweb_edu", "loader_"),
    ],
)
def test_events_of_fineweb_edu_have_their_own_names(address: str, prefix: str) -> None:
    data = TrainData(*resolve(None, {"dataset": address}))
    data.close()
    assert data.prefix == prefix
    assert bool(data.title) == (prefix != "loader_")


def test_documents_that_were_read_are_reported_on_the_console(docs: Path, tmp_path: Path) -> None:
    how = ("--dataset", docs, *SMALL, "--steps", 2)
    run = Child(tmp_path / "out", *how, NSA_FWE_REPORT_DOCS="1").end().good()
    assert re.search(r"^\[train\] \d+ documents", run.said, re.MULTILINE), run.said
    assert run.errors == ""


def test_secrets_of_an_address_are_not_written(tmp_path: Path) -> None:
    address = "http://user:open-sesame@127.0.0.1:1/x.jsonl?token=hush"
    how = ("--dataset", address, *SMALL, "--steps", 1, "--loader-timeout", 1)
    run = Child(tmp_path / "out", *how).end()  # which is still trying to connect
    assert run.code == 1
    written = (run.out / "heartbeat_rank0.jsonl").read_text() + run.said + run.errors
    assert "open-sesame" not in written
    assert "hush" not in written


def test_the_reader_of_the_console_may_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as gone:
        patch.setattr(sys, "stdout", gone)
        show("nobody reads this")
        with sys.stdout:  # not the pipe any more
            show("nor this")
        with contextlib.suppress(BrokenPipeError):
            gone.close()
