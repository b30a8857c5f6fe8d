"""The report: its numbers, its words, and a page that text from a file cannot break."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, SourceError
from penstock.watch.report import Report, report
from tests import commands
from tests.recorded import Recording, write_run

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--]]>\u2028\x1b[31m"
EVENTFUL = Recording(
    ranks=4,
    steps=300,
    slow_rank=2,
    stalls=(150,),
    checkpoint_every=100,
    torn=4,
    slower_from=220,
    fallback_at=200,
)
RUN_FIELDS = """version ranks ranks_expected band data_wait_pct worst_rank tokens_per_s low high
    steady_from overhead_s overhead_pct shape begun last_line ended skipped_lines headline
    sentences warnings"""
RANK_FIELDS = """rank steps first_step last_step sessions ended shape data_wait_pct
    waits_pct next_p50_ms next_p95_ms next_p99_ms tokens_per_s tokens wall_s
    first_batch_s warmup_wait_s last_loss loss_not_finite loss_not_finite_steps fell_back events
    dropped_lines words shuffle_quality"""
GOLDEN = {
    "good": (
        Recording(),
        {
            "band": "good",
            "data_wait_pct": 2.98,
            "tokens_per_s": 65_672,
            "overhead_s": 9.39,
            "overhead_pct": 13.6,
            "begun": "2026-09-21 14:13:20 UTC",
            "last_line": "2026-09-21 14:14:34 UTC",
            "ended": "finished",
        },
        {
            "steps": 240,
            "first_step": 1,
            "last_step": 240,
            "waits_pct": {"fetch": 0.895, "tokenize": 2.09},
            "next_p50_ms": 7.465,
            "next_p95_ms": 11.47,
            "next_p99_ms": 11.91,
            "tokens_per_s": 56_770,
            "tokens": 3_932_160,
            "wall_s": 69.27,
            "first_batch_s": 3.526,
            "warmup_wait_s": 0.4125,
            "last_loss": 2.6371,
            "sessions": 1,
        },
    ),
    "poor": (
        Recording(wait=0.4, seed=3),
        {"band": "poor", "data_wait_pct": 39.5, "tokens_per_s": 65_704},
        {"next_p50_ms": 95.2, "wall_s": 65.26, "last_loss": 2.5772, "first_batch_s": 3.841},
    ),
    "resumed": (
        Recording(steps=300, resumed_at=100),
        {"data_wait_pct": 3.02, "tokens_per_s": 65_340, "overhead_pct": 15.0},
        {"sessions": 2, "first_step": 101, "steps": 200, "tokens": 3_276_800, "wall_s": 59.0},
    ),
    "killed": (
        Recording(steps=120, nan_loss_from=90, ended=False),
        {"band": "good", "ended": None, "ranks_expected": 1},
        {"loss_not_finite": 90, "loss_not_finite_steps": 31, "last_loss": 4.8472},
    ),
    "begun": (
        Recording(steps=0, ended=False),
        {"band": None, "data_wait_pct": None, "tokens_per_s": None, "steady_from": None},
        {"steps": 0, "first_step": None, "tokens": None, "wall_s": 0.0, "first_batch_s": 3.526},
    ),
    "bare": (
        Recording(steps=60, bare=True),
        {"band": None, "data_wait_pct": None, "ended": "no reason given", "overhead_pct": 38.4},
        {"waits_pct": {}, "next_p50_ms": None, "tokens_per_s": None, "last_loss": None},
    ),
}
"""Recorded runs, and numbers of the run and of rank 0."""


class Page(HTMLParser):
    """The elements of a page and its visible text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._hidden = False
        self.feed(html)
        self.close()
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data + " "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, one of them slow, with everything that happens to a run."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, EVENTFUL)
    return folder


@pytest.fixture(scope="module")
def made(run: Path) -> Report:
    return report(run)


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_of_recorded_runs(tmp_path: Path, name: str) -> None:
    recording, of_run, of_rank = GOLDEN[name]
    write_run(tmp_path, recording)
    numbers = report(tmp_path).numbers
    assert numbers.keys() == set(RUN_FIELDS.split())
    assert numbers["ranks"][0].keys() == set(RANK_FIELDS.split())
    assert json.dumps(numbers, allow_nan=False)
    for found, expected in ((numbers, of_run), (numbers["ranks"][0], of_rank)):
        for field, value in expected.items():
            exact = value is None or isinstance(value, str)
            assert found[field] == (value if exact else pytest.approx(value, rel=0.02)), field


def test_a_slow_rank_is_named_and_charged(made: Report) -> None:
    numbers = made.numbers
    assert (numbers["worst_rank"], numbers["band"]) == (2, "fair")
    assert numbers["low"] <= numbers["tokens_per_s"] <= numbers["high"]
    assert numbers["tokens_per_s"] == pytest.approx(4 * 16_384 / 0.27, rel=0.1)
    assert [abs(change["step"] - 220) <= 2 for change in numbers["shape"]["changes"]] == [True]
    assert 150 in numbers["shape"]["spikes"]
    assert numbers["skipped_lines"] == 20  # of each rank four, and the one that was being written
    for one in numbers["ranks"]:
        assert sum(one["waits_pct"].values()) == pytest.approx(one["data_wait_pct"])
        assert (one["steps"], one["events"]["stall"], one["fell_back"]) == (300, 1, True)
    assert numbers["ranks"][0]["waits_pct"]["ranks"] > numbers["ranks"][0]["waits_pct"]["fetch"]


def test_verdict_first_batch_step_time_and_data_wait_appear_once(tmp_path: Path) -> None:
    write_run(tmp_path, Recording())
    made = report(tmp_path)
    page = Page(made.html()).text
    assert page.index("good") < page.index("of the time is spent waiting") < page.index("Step time")
    assert made.summary.startswith("Data keeps up: 3.0 % of the time is spent waiting for data")
    for value in ("3.0 %", "250 ms", "3.53 s"):
        assert page.count(value) == 1, value


def test_page_shows_what_happened(made: Report) -> None:
    page = Page(made.html())
    for shown in (
        "stage fetch, where hf://datasets/org/name@abc/data/part-00017.parquet, wait_s 1.5",
        "to synthetic, reason no batch within 60 s",
        "error 503",
        "reason finished",
        "prefetch_size",
        "torch",
        "Ranks 0, 1, 2, 3: it fell back to synthetic data",
        "slower since step 220",
    ):
        assert shown in page.text, shown
    assert page.tags.count("figure") == 9
    assert page.tags.count("table") == 3
    assert ("lang", "en") in page.attributes


def test_page_is_one_file_that_requests_nothing(made: Report) -> None:
    attributes = Page(made.html()).attributes
    assert [v for name, v in attributes if name in ("src", "href", "action")] == ["data:,"]
    assert not [name for name, _ in attributes if name.startswith("on")]
    policy = next(v for name, v in attributes if name == "content" and "default-src" in v)
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    what = Recording(steps=80, stalls=(40,), fallback_at=50)
    write_run(tmp_path / "plain", replace(what, settings={"path": "x"}))
    settings = {"path": NASTY, NASTY: [NASTY]}
    [path] = write_run(tmp_path / "nasty", replace(what, settings=settings, stall_file=NASTY))
    path.write_text(
        path.read_text().replace("node0", "<i>node</i>").replace('"list"', '"<b>list</b>"')
    )
    nasty, plain = report(tmp_path / "nasty"), report(tmp_path / "plain")
    page = Page(nasty.html())
    assert sorted(page.tags) == sorted([*Page(plain.html()).tags, "tr", "td", "td"])
    shown = re.sub(r"\s+", " ", NASTY.replace("\x1b", "\N{REPLACEMENT CHARACTER}"))
    assert shown in page.text
    assert "\x1b" not in nasty.summary


def test_advice_of_the_loader_is_shown(tmp_path: Path) -> None:
    [path] = write_run(tmp_path, Recording(wait=0.4))
    advice = "input-bound 36 %: tokenize 36 %: raise n_workers 2 → 3"
    path.write_text(re.sub(r"input-bound [^\"]*", advice, path.read_text()))
    assert "What to change: raise n_workers 2 → 3." in report(tmp_path).summary


def test_shuffle_quality_is_that_of_the_last_beat(tmp_path: Path) -> None:
    [path] = write_run(tmp_path, Recording())
    path.write_text(path.read_text().replace('"verdict":', '"shuffle_quality": 0.8, "verdict":'))
    made = report(tmp_path)
    assert made.numbers["ranks"][0]["shuffle_quality"] == pytest.approx(0.8)
    assert "A batch mixes 80 % of the source chunks" in made.summary


def test_files_that_make_no_report_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        report(tmp_path / "nowhere*.jsonl")
    empty = tmp_path / "heartbeat_rank0.jsonl"
    empty.write_text("not a heartbeat\n")
    with pytest.raises(SourceError, match=r"no heartbeat line in .*heartbeat_rank0"):
        report(empty)
    a, b = write_run(tmp_path / "a")[0], write_run(tmp_path / "b")[0]
    with pytest.raises(ConfigError, match="both of rank 0"):
        report(a, b)
    with pytest.raises(SourceError, match="missing"):
        report(a, tmp_path / "missing")


def invoke(*args: str | Path) -> Any:
    return commands.run("report", *args)


def test_command_writes_the_page_and_prints_the_verdict(run: Path, tmp_path: Path) -> None:
    out, numbers = tmp_path / "new" / "report.html", tmp_path / "numbers.json"
    done = invoke(run / "heartbeat*.jsonl", "-o", out, "--json", numbers)
    assert done.exit_code == 0, done.output
    assert "of the time is spent waiting" in done.output.splitlines()[0]
    assert done.output.splitlines()[-1] == f"report: {out}"
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(numbers.read_text())["worst_rank"] == 2


def test_json_to_stdout_writes_no_page_and_needs_no_plotly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    write_run(tmp_path / "artifacts" / "train_showcase", Recording(steps=60))
    done = invoke("--json", "-")
    assert json.loads(done.output)["band"] == "good"
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(ConfigError, match=re.escape("pip install 'penstock[report]'")):
        report(tmp_path / "artifacts" / "train_showcase").html()


def test_a_file_that_cannot_be_written_is_an_error(run: Path, tmp_path: Path) -> None:
    for arguments in (["-o", tmp_path], ["-o", tmp_path / "x.html", "--json", tmp_path]):
        done = invoke(run, *arguments)
        assert done.exit_code == 1
        assert str(tmp_path) in done.stderr
