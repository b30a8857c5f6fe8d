"""What a run says of itself is true: at its end, on its console, in its events."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import app
from penstock.train.console import steady_lines
from penstock.train.data import recipe
from penstock.train.options import resolve
from penstock.watch.steady import StepEvent
from tests.servers import FileServer
from tests.train.runs import SMALL, Child, here, train


def test_the_steady_rate_is_that_of_all_ranks_and_steps_have_the_numbers_of_the_run() -> None:
    times, waits = [1.0] * 5 + [0.1] * 60, [0.9] * 5 + [0.001] * 60
    lines = steady_lines(times, waits, [100] * 65, [], world=2, first=31)
    assert "steady from step 36 on; the 5 before cost" in lines[0]
    assert "steady: 2,000 tokens/s" in lines[1]
    assert lines[2].startswith("why steps 31-35: data wait")


def test_a_slow_step_in_which_torch_compiled_is_explained_by_that() -> None:
    compiled = [StepEvent(0, "compiles", 2.0)]
    lines = steady_lines([3.0] + [0.1] * 60, [0.0] * 61, [100] * 61, compiled, world=1, first=1)
    assert any(line.startswith("why step 1:") and "compil" in line for line in lines), lines


def test_data_wait_at_the_end_of_a_single_step_is_no_more_than_all_of_it(
    docs: Path, tmp_path: Path
) -> None:
    run = train(tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 1).good()
    (told,) = re.findall(r"^  Data wait: (.*)%$", run.said, re.MULTILINE)
    assert 0 < float(told) <= 100, run.said


def test_documents_that_were_read_are_reported_on_the_console(docs: Path, tmp_path: Path) -> None:
    child = Child(
        tmp_path / "out", "--dataset", docs, *SMALL, "--steps", 2, NSA_FWE_REPORT_DOCS="1"
    )
    run = child.end().good()
    assert re.search(
        r"^\[train\] \d+ documents, \d+\.\d MB of text read$", run.said, re.MULTILINE
    ), run.said
    assert run.errors == ""


def test_what_is_secret_of_an_address_is_told_nobody(docs: Path, tmp_path: Path) -> None:
    with FileServer({"docs.jsonl": docs}) as server:
        host = server.url.removeprefix("http://")
        address = f"http://bob:SECRETWORD@{host}/docs.jsonl?sig=SECRETSIGN"
        run = train(tmp_path / "out", "--dataset", address, *SMALL, "--steps", 2).good()
        smoke = here(lambda: app(["smoke", "--dataset", address]), tmp_path / "out")
    assert run.of("boot")[0]["settings"]["dataset"] == f"http://{host}/docs.jsonl"
    left = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert left
    for text in (
        *left,
        run.said.encode(),
        run.errors.encode(),
        smoke.said.encode(),
        smoke.errors.encode(),
    ):
        assert b"SECRET" not in text
    assert "[smoke][OK]" in smoke.said


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_log_line_that_nobody_reads_ends_no_run(level: int) -> None:
    code = (
        "import io, logging, os, sys\n"
        "from penstock.cli.train import _Log\n"
        "class Gone(io.StringIO):\n"
        "    def write(self, text): raise BrokenPipeError(32, 'Broken pipe')\n"
        "logging.getLogger('penstock').addHandler(_Log())\n"
        "logging.getLogger('penstock').setLevel(logging.INFO)\n"
        "sys.stdout, sys.stderr = Gone(), Gone()\n"
        f"logging.getLogger('penstock').log({level}, 'something')\n"
        "os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7


FINEWEB = "hf://datasets/HuggingFaceFW/fineweb-edu"


@pytest.mark.parametrize(
    ("address", "its_own"),
    [
        ("fineweb_edu", True), (FINEWEB, True), (f"{FINEWEB}/sample/10BT", True), (f"{FINEWEB}@abc/data", True),
        (f"{FINEWEB}-2", False), ("fineweb_edu_old_notes.txt", False), ("stdlib", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_file", [False, True])
def test_events_of_fineweb_edu_have_names_of_their_own_however_it_is_spelled(
    address: str, its_own: bool, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(f'[data]\nkind = "text"\nurls = "{address}"\ntokenizer = "byte"\nseq_len = 8\n')
    made = recipe(*resolve(file, {}) if in_file else resolve(None, {"dataset": address}))
    assert made.prefix == ("fineweb_loader_" if its_own else "loader_")
    assert made.title == ("FineWeb-Edu" if its_own else "")
