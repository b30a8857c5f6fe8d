"""The report: its numbers, its words, and a page that nothing from a file can break."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.cli.report import report as command
from penstock.errors import ConfigError, MissingExtra, NoData, PenstockError
from penstock.watch.heartbeat import Heartbeat
from penstock.watch.page.run import read_run
from penstock.watch.page.series import drawn, stretches
from penstock.watch.report import Report, compare, report
from tests.recorded import Recording, write_run

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--]]>\u2028\x1b[31m"


class Seen(HTMLParser):
    """The elements of a page, and what its scripts and its visible text hold."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.data: dict[str, Any] = {}
        self.shown: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = (
            "json" if ("id", "figures") in attrs else tag if tag in ("script", "style") else ""
        )

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "json":
            self.data = json.loads(data)
        elif not self._inside:
            self.shown.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.shown))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, one of them slow, with everything that happens to a run."""
    folder = tmp_path_factory.mktemp("run")
    what = Recording(
        ranks=4, steps=300, slow_rank=2, wait=0.03, stalls=(150,), checkpoint_every=100, torn=4
    )
    write_run(folder, replace(what, slower_from=220, fallback_at=200))
    return folder


@pytest.fixture(scope="module")
def made(run: Path) -> Report:
    return report(run)


@pytest.mark.parametrize(
    ("wait", "band"), [(0.004, "excellent"), (0.03, "good"), (0.1, "fair"), (0.4, "poor")]
)
def test_the_verdict_comes_first_with_its_band_and_number(
    tmp_path: Path, wait: float, band: str
) -> None:
    write_run(tmp_path, Recording(wait=wait, steps=120))
    made = report(tmp_path)
    assert made.numbers["band"] == band
    assert made.numbers["data_wait_pct"] == pytest.approx(100 * wait, rel=0.15)
    page = Seen(made.html)
    assert (
        page.words.index(band)
        < page.words.index("of the time goes into waiting")
        < page.words.index("Step time")
    )
    assert band in made.summary


def test_numbers_are_those_of_the_run(made: Report) -> None:
    numbers = made.numbers
    assert numbers["worst_rank"] == 2
    assert [one["rank"] for one in numbers["ranks"]] == [0, 1, 2, 3]
    assert abs(numbers["steady_from"] - 13) <= 3  # after 12 steps of warmup
    assert numbers["low"] <= numbers["tokens_per_s"] <= numbers["high"]
    assert numbers["tokens_per_s"] == pytest.approx(4 * 16_384 / 0.27, rel=0.1)
    assert numbers["overhead_s"] > 5
    for one in numbers["ranks"]:
        assert sum(one["waits_pct"].values()) == pytest.approx(one["data_wait_pct"])
        assert one["steps"] == 300
        assert one["events"]["stall"] == 1
        assert one["skipped_lines"] == 5  # four, and the one that was being written
        assert one["shape"]["kind"] == "slowdown"
        assert any(abs(change["step"] - 220) <= 2 for change in one["shape"]["changes"])
    assert numbers["ranks"][0]["waits_pct"]["ranks"] > numbers["ranks"][0]["waits_pct"]["fetch"]
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_a_page_is_one_file_that_asks_nobody_for_anything(made: Report) -> None:
    page = Seen(made.html)
    addresses = [
        value
        for _, name, value in page.attributes
        if name in ("src", "href", "srcset", "action", "data")
    ]
    assert addresses == ["data:,"]
    policy = next(
        value for _, name, value in page.attributes if name == "content" and "default-src" in value
    )
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_what_happened_is_on_the_page(made: Report) -> None:
    page = Seen(made.html)
    for told in (
        "waited 1.5 s for fetch, hf://datasets/org/name@abc/data/part-00017.parquet",
        "to synthetic data: no batch within 60 s",
        "n_workers: 2 → 3, because tokenize is busy, kept",
        "checkpoint, 3 s",
        "RemoteError: 503 in fetch",
        "warn: tokens/s fell below the limit",
        "finished after 300 steps",
        "prefetch_size",
        "torch",
        "Ranks 0, 1, 2, 3: it fell back to synthetic data",
        "slower at step 220",
    ):
        assert told in page.words.replace("\N{NO-BREAK SPACE}", " "), told
    assert page.tags.count("figure") == page.tags.count("figcaption") == 9
    assert page.tags.count("table") == page.tags.count("caption") > 4
    assert "h2" in page.tags
    assert ("html", "lang", "en") in page.attributes
    assert len([1 for _, name, value in page.attributes if (name, value) == ("role", "img")]) == 9


def test_each_plot_is_one_that_plotly_accepts(run: Path, made: Report) -> None:
    import plotly.graph_objects as go

    def painted(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: painted(one) for name, one in value.items()}
        if isinstance(value, list):
            return [painted(one) for one in value]
        return "#123456" if isinstance(value, str) and value.startswith("@") else value

    figures = Seen(made.html).data
    assert set(figures["ranks"]) == {"0", "1", "2", "3"}
    names = {"step-time", "waits", "next", "queue", "rate", "loss", "memory", "ledger"}
    assert set(figures["ranks"]["2"]) == names
    both = Seen(compare(run, run).html).data["common"]
    assert set(both) == {"rates", "spread", "both-waits", "both-steps"}
    for figure in [*figures["ranks"]["2"].values(), *figures["common"].values(), *both.values()]:
        go.Figure(
            data=painted(figure["data"]), layout=painted(figure["layout"])
        )  # raises for what it does not know
        assert figure["data"]
        assert len(figure["alt"]) > 20


def test_warmup_is_shaded_and_steady_state_marked(made: Report) -> None:
    steady = made.numbers["ranks"][2]["shape"]["from_step"]
    layout = Seen(made.html).data["ranks"]["2"]["step-time"]["layout"]
    shaded = [shape for shape in layout["shapes"] if shape["type"] == "rect"]
    assert [(shape["x0"], shape["x1"]) for shape in shaded] == [(0.5, steady - 0.5)]
    assert f"steady from {steady}" in [note["text"] for note in layout["annotations"]]


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    plain, nasty = tmp_path / "plain", tmp_path / "nasty"
    what = Recording(steps=80, stalls=(40,), fallback_at=50, ranks=2)
    write_run(plain, replace(what, settings={"path": "x"}))
    paths = write_run(
        nasty, replace(what, settings={"path": NASTY, NASTY: [NASTY]}, stall_file=NASTY)
    )
    paths[0].rename(nasty / "heartbeat_rank<b>0.jsonl")
    paths[1].write_text(
        paths[1].read_text().replace("node0", "<i>node</i>").replace("tokenize is busy", "<script>")
    )
    page, innocent = Seen(report(nasty).html), Seen(report(plain).html)
    extra = ["tr", "th", "td"]  # the setting with the nasty name
    assert sorted(page.tags) == sorted(innocent.tags + extra)
    assert NASTY.replace("\x1b", "\N{REPLACEMENT CHARACTER}") in "\n".join(page.shown)
    assert not any(
        "<script" in note
        for figure in page.data["ranks"]["0"].values()
        for note in json.dumps(figure).split()
    )
    assert "\x1b" not in report(nasty).summary
    assert "\x1b" not in compare(plain, nasty).summary
    Seen(compare(plain, nasty).html)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, 1, 1e-300, 1e300, -1, "nan", "inf", 1e18, 10**30])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["fetch", "depth", "x", ""]), inner)
    ),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "dt_step_s",
        "dt_fetch_s",
        "tokens",
        "toks_per_s",
        "loss",
        "fetch_p50_ms",
        "fetch_p99_ms",
        "data_wait_pct",
        "queue_depth",
        "queue_capacity",
        "rss_bytes",
        "compiles",
        "paused",
        "wait_by_stage",
        "stages",
        "fetch",
        "queues",
        "verdict",
        "dropped",
        "dt",
        "ledger",
        "wait_ms",
        "kept",
        "reasons",
        "status",
        "settings",
        "versions",
        "host",
        "world_size",
        "resumed",
        "rotated",
        "reason",
        "what",
        "seconds",
    ]
)


def test_a_long_run_of_eight_ranks_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(ranks=1, steps=1_700))
    whole = (tmp_path / "heartbeat_rank0.jsonl").read_text()
    for rank in range(1, 8):
        (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text(
            whole.replace('"rank": 0', f'"rank": {rank}')
        )
    made = report(tmp_path)
    assert len(Seen(made.html).data["ranks"]) == 8
    assert (
        len(made.html.encode()) < 8_000_000
    )  # lines are at their limit of points already, so 200,000 steps are no more


def test_a_resumed_run_is_judged_by_its_last_session_and_counts_steps_once(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=300, resumed_at=100))
    made = report(tmp_path)
    one = made.numbers["ranks"][0]
    assert (one["sessions"], one["first_step"], one["last_step"]) == (2, 101, 300)
    assert abs(one["shape"]["from_step"] - 113) <= 3
    assert "1 to 110" in Seen(made.html).words
    rank = read_run([tmp_path]).first
    covered = [step for part, _, _ in stretches(rank) for step in rank.step[part].tolist()]
    assert sorted(covered) == list(range(1, 301))
    x, y = drawn(rank, rank.columns["dt_step_s"])
    assert np.isnan(y).sum() == 1  # the line is broken where the run was
    assert len(x) == 311


def test_what_a_heartbeat_writes_a_report_reads(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, rank=0, settings={"prefetch_size": 8}) as beat:
        for step in range(1, 61):
            loss = float("inf") if step == 40 else 2.0
            beat.progress(
                step,
                loss=loss,
                tokens=100,
                dt_step_s=0.1,
                dt_fetch_s=0.01,
                wait_by_stage={"pack": 0.01},
            )
        beat.event("stall", stage="fetch", where="part-0", wait_s=1.5)
    made = report(tmp_path)
    one = made.numbers["ranks"][0]
    assert (one["steps"], one["loss_not_finite"], one["events"]["stall"]) == (60, 40, 1)
    assert one["waits_pct"] == {"pack": pytest.approx(10)}
    assert made.numbers["tokens_per_s"] == pytest.approx(1000)
    assert made.numbers["ended"] is not None
    assert "prefetch_size" in Seen(made.html).words


def test_files_that_make_no_report_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="nowhere"):
        report(tmp_path / "nowhere*.jsonl")
    empty = tmp_path / "heartbeat_rank0.jsonl"
    empty.write_text("not a heartbeat\n")
    with pytest.raises(NoData, match=r"no heartbeat line in .*heartbeat_rank0"):
        report(empty)
    a, b = write_run(tmp_path / "a")[0], write_run(tmp_path / "b")[0]
    with pytest.raises(
        ConfigError,
        match=f"{re.escape(str(a))} and {re.escape(str(b))} are both of rank 0.*--compare",
    ):
        report(a, b)
    with pytest.raises(NoData, match="missing"):
        report(a, tmp_path / "missing")


def invoke(*args: str | Path) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_command_writes_the_page_and_says_the_verdict(run: Path, tmp_path: Path) -> None:
    out, numbers = tmp_path / "new" / "report.html", tmp_path / "numbers.json"
    done = invoke(run / "heartbeat*.jsonl", "-o", out, "--json", numbers)
    assert done.exit_code == 0, done.output
    assert "of the time goes into waiting" in done.output.splitlines()[0]
    assert done.output.splitlines()[-1] == f"report: {out}"
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(numbers.read_text())["worst_rank"] == 2


def test_without_arguments_it_takes_the_usual_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "artifacts" / "train_showcase", Recording(steps=60))
    assert invoke().exit_code == 0
    assert (tmp_path / "report.html").exists()


def test_mistakes_on_the_command_line_are_explained(run: Path, tmp_path: Path) -> None:
    one = invoke("--compare", run)
    assert isinstance(one.exception, ConfigError)
    assert "needs two runs, got 1" in str(one.exception)
    folder = invoke(run, "-o", tmp_path)
    assert isinstance(folder.exception, PenstockError)
    assert str(tmp_path) in str(folder.exception)
    assert isinstance(
        invoke(run, "-o", tmp_path / "x.html", "--json", tmp_path).exception, PenstockError
    )


def test_without_plotly_the_extra_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'penstock[report]'")):
        report(run)
