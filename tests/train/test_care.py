"""A run takes care of what is not its own, and of what it has done so far."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.demo import _clear
from penstock.cli.main import cli
from penstock.errors import ConfigError
from tests.train.runs import SMALL, Child, Run, train


@pytest.fixture(scope="module")
def done(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a checkpoint."""
    return train(
        tmp_path_factory.mktemp("done") / "out", "--dataset", docs, *SMALL, "--steps", 2
    ).good()


def resume(done: Run, docs: Path, out: Path, *more: Any) -> Run:
    """Another run, in a copy of that one's folder."""
    if not out.exists():
        shutil.copytree(done.out, out)
    return train(out, "--dataset", docs, *SMALL, "--steps", 4, "--resume", *more)


def test_the_demo_removes_what_a_demo_left_and_refuses_any_other_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    (tmp_path / "heartbeat_rank0.jsonl").write_text("")
    _clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        _clear(tmp_path)
    assert CliRunner().invoke(cli, ["demo", "--out", str(tmp_path)]).exit_code == 1
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match="is a file"):
        _clear(tmp_path / "thesis.txt")


def test_resuming_where_every_checkpoint_is_damaged_is_an_error_and_moves_nothing(
    done: Run, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done.out, out)
    for path in out.rglob("*.distcp"):
        path.unlink()
    run = resume(done, docs, out)
    assert run.code == 1
    assert "none is complete" in run.errors
    assert (out / "checkpoints" / "step-00000002").is_dir()
    assert not (out / "checkpoints.1").exists()


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(docs: Path, tmp_path: Path) -> None:
    first = Child(tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 100000).until("step 2/")
    second = train(tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 2)
    assert second.code == 1
    assert "another run is using it" in second.errors
    for _ in range(5):  # and who is told again and again still ends well
        first.send(signal.SIGTERM)
    assert first.end().good().saved().step >= 2


def test_a_folder_that_cannot_be_written_to_is_found_out_before_anything_is_trained(
    docs: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    run = train(tmp_path / "file" / "out", "--dataset", docs, *SMALL, "--steps", 2)
    assert run.code == 1
    assert "cannot be written" in run.errors


def test_the_first_batch_has_its_time_and_no_more_with_a_warmup_too(tmp_path: Path) -> None:
    from tests.servers import Fault, HubServer
    from tests.train.conftest import serve

    with HubServer() as hub:
        serve(hub)
        hub.fault(Fault("silence", path="*.parquet", times=None))
        run = train(
            tmp_path / "out", "--dataset", "fineweb_edu", *SMALL, "--steps", 2, "--loader-timeout", 3,
            HF_ENDPOINT=hub.endpoint, NSA_FWE_WARMUP_BATCHES="2", NSA_FWE_WARMUP_TIMEOUT="500",
        )  # fmt: skip
    assert run.code == 1
    assert "no batch within 3 s" in run.errors
