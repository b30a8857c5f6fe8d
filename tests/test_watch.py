"""`penstock watch`: what it makes of heartbeat lines, and how it shows them, on a real terminal and without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from penstock.watch.live import RunView
from penstock.watch.view.follow import Follower
from penstock.watch.view.plain import plain
from penstock.watch.view.screen import Look, screen
from tests.recorded import Recording, lines, write_run

COMMAND = (sys.executable, "-m", "penstock.cli.main", "watch")
PATIENCE_S = 60.0
"""How long something may take on a machine that has other things to do."""
NOW = 1_790_000_000.0


def line(msg: str, rank: int = 0, step: int = 0, ts: float = NOW, **fields: Any) -> dict[str, Any]:
    known = {"ts": ts, "iso": "2026-09-21T14:13:20.000Z", "mono": ts - NOW + 100.0, "pid": 1}
    return known | {"rank": rank, "step": step, "msg": msg} | fields


def view_of(run: Recording, **options: Any) -> RunView:
    view = RunView(**options)
    for rank in range(run.ranks):
        view.extend(lines(run, rank))
    return view


def last_ts(view: RunView) -> float:
    return max(rank.ts or 0.0 for rank in view.ranks.values())


# What it makes of the lines


def test_the_view_has_the_latest_of_each_rank() -> None:
    run = Recording(steps=80, ranks=2, ended=False)
    view = view_of(run)
    assert [rank.rank for rank in view.in_order()] == [0, 1]
    for rank in view.in_order():
        last = [found for found in lines(run, rank.rank) if found["msg"] == "progress"][-1]
        assert rank.step == 80
        assert (rank.loss, rank.data_wait_pct) == (last["loss"], last["data_wait_pct"])
        assert rank.tokens_per_s == last["toks_per_s"]
        assert rank.tokens == 80 * run.tokens
        assert rank.queue_capacity == 8
        assert rank.state(last_ts(view)) == "steady"
    assert view.warmth() == "steady since step 13"


def test_a_rank_without_a_line_for_ten_seconds_is_stale_until_it_speaks_again() -> None:
    view = RunView()
    view.add(line("progress", step=5))
    view.add(line("progress", rank=1, step=5, ts=NOW + 15))
    assert [rank.stale(NOW + 15) for rank in view.in_order()] == [True, False]
    assert view.ranks[0].state(NOW + 15) == "stale"
    slowest = view.slowest(NOW + 15)
    assert slowest is not None
    assert slowest.rank == 0
    assert view.verdict(NOW + 15) == "rank 0 has said nothing for 15 s"
    view.add(line("beat", step=5, ts=NOW + 16))
    assert not view.ranks[0].stale(NOW + 16)


def test_a_stuck_step_is_shown_with_its_stage_and_file_until_the_next_step() -> None:
    view = RunView()
    view.add(line("progress", step=5, data_wait_pct=1.0))
    view.add(
        line(
            "beat",
            step=5,
            waiting={"stage": "fetch", "where": "part-3.parquet", "for_s": 7.5},
            verdict="fine",
        )
    )
    assert view.ranks[0].state(NOW) == "waits for fetch"
    assert view.verdict(NOW) == "waiting for fetch for 7.5 s: part-3.parquet"
    view.add(line("progress", step=6, data_wait_pct=1.0))
    assert view.verdict(NOW) == "fine"


def test_progress_and_arrival_come_from_the_tokens_that_were_asked_for() -> None:
    run = Recording(steps=100, ranks=2, ended=False)
    view = view_of(run, total_tokens=400 * run.tokens)
    now = last_ts(view)
    progress = view.progress(now)
    assert progress is not None
    assert (progress.tokens, progress.share) == (200 * run.tokens, 0.5)
    rates = [rank.tokens_per_s or 0.0 for rank in view.in_order()]
    assert progress.eta_s == pytest.approx(200 * run.tokens / sum(rates))


def test_a_run_is_over_when_all_ranks_have_ended_or_one_was_lost() -> None:
    view = RunView()
    assert not view.over(NOW)
    view.add(line("progress", step=5))
    view.add(line("shutdown", rank=1, step=5, reason="finished"))
    assert not view.over(NOW + 60)
    assert view.over(NOW + 400)
    assert not view.ended
    view.add(line("shutdown", step=5, reason="finished"))
    assert view.over(NOW)
    assert view.ended
    view.add(line("boot", ts=NOW + 1))
    assert not view.over(NOW + 1)


def test_stage_shares_are_those_of_the_last_minute() -> None:
    view = RunView()
    for second in range(200):
        busy = min(second, 100) * 1.0  # it was busy in the first half only
        stages = {
            "tokenize": {
                "busy_s": busy,
                "blocked_in_s": second - busy,
                "items": second,
                "bytes": 10 * second,
            }
        }
        view.add(line("beat", ts=NOW + second, stages=stages))
    (share,) = view.ranks[0].stages()
    assert share.stage == "tokenize"
    assert (share.busy, share.blocked_in) == (0.0, pytest.approx(1.0))
    assert (share.items_per_s, share.bytes_per_s) == (pytest.approx(1.0), pytest.approx(10.0))


# How it is drawn


def drawn(view: RunView, now: float, look: Look) -> list[str]:
    out = StringIO()
    console = Console(
        file=out, width=look.width, height=look.height, highlight=False, color_system=None
    )
    console.print(screen(view, now, look))
    return out.getvalue().splitlines()


@cache
def busy(ranks: int) -> RunView:
    return view_of(
        Recording(steps=70, ranks=ranks, stalls=(40,), ended=False, settings={"max_steps": 500})
    )


@pytest.mark.parametrize("ranks", [1, 3, 40])
@pytest.mark.parametrize(
    ("width", "height"), [(40, 10), (60, 24), (80, 24), (80, 12), (120, 40), (200, 60)]
)
def test_the_screen_fits_and_has_the_verdict_and_the_slowest_rank(
    width: int, height: int, ranks: int
) -> None:
    view = busy(ranks)
    shown = drawn(view, last_ts(view), Look(width=width, height=height))
    assert len(shown) <= height
    assert max(map(cell_len, shown)) <= width
    assert any("input-bound" in text for text in shown)
    table = [text for text in shown if re.match(r" *\d+ +70 ", text)]
    slowest = view.slowest(last_ts(view))
    assert slowest is not None
    assert any(re.match(rf" *{slowest.rank} ", text) for text in table)
    if len(table) < ranks:
        assert f"and {ranks - len(table)} more ranks" in "\n".join(shown)


def test_an_escape_sequence_in_a_file_name_reaches_no_terminal() -> None:
    view = RunView()
    bad = "\x1b]0;owned\x07[bold]part\u202e\x9b31m.parquet\n"
    view.add(line("boot", host=bad, versions={"penstock": bad}))
    view.add(line("stall", stage=bad, where=bad, wait_s=1.0))
    view.add(line("beat", waiting={"stage": bad, "where": bad, "for_s": 2.0}))
    view.add(line("shutdown", rank=1, reason=bad))
    shown = "\n".join([*drawn(view, NOW, Look(width=150)), *plain(view, NOW)])
    assert "[bold]part" in shown  # it is a name, not markup
    assert all(character.isprintable() or character == "\n" for character in shown)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["nan", "fetch"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    [
        "ts",
        "mono",
        "step",
        "loss",
        "tokens",
        "tokens_total",
        "toks_per_s",
        "dt_step_s",
        "data_wait_pct",
        "wait_by_stage",
        "queue_depth",
        "queue_capacity",
        "stages",
        "waiting",
        "verdict",
        "since_step_s",
        "dropped",
        "compiles",
        "settings",
        "host",
        "world_size",
        "resumed",
        "rotated",
        "stage",
        "where",
        "wait_s",
        "reason",
        "to",
        "status",
        "reasons",
        "at_step",
        "tokens_per_s",
        "name",
        "seconds",
        "what",
        "from",
        "why",
        "kept",
        "dt",
        "wait_ms",
        "requested",
        "error",
    ]
)
MSGS = st.sampled_from(
    [
        "boot",
        "progress",
        "beat",
        "stall",
        "pause",
        "tune",
        "fallback",
        "steady_state",
        "health",
        "shutdown",
        "loader_ready",
        "fineweb_loader_warmup",
        "loader_error",
        "nonsense",
    ]
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(MSGS, st.integers(0, 2) | JSON, st.dictionaries(FIELDS, JSON, max_size=6)),
        max_size=6,
    )
)
@example([("stall", 0, {}), ("stall", 1 << 40, {})])
def test_whatever_a_line_says_the_view_can_be_drawn(
    told: list[tuple[str, Any, dict[str, Any]]],
) -> None:
    view = RunView()
    for msg, rank, fields in told:
        view.add(line(msg) | fields | {"rank": rank})
    shown = drawn(view, NOW, Look(width=80, height=24, rank=1))
    assert len(shown) <= 24
    assert all(text.isprintable() for text in [*shown, *plain(view, NOW)])


# Which files


def test_files_that_come_later_are_picked_up_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.watch.view.follow.LOOK_S", 0.0)
    follower = Follower([tmp_path / "run"])
    assert follower.poll() == []
    assert "waiting for" in follower.notes()[0]
    first, second = write_run(tmp_path / "run", Recording(steps=3, ranks=2))
    second.rename(tmp_path / "elsewhere")
    assert {found["rank"] for found in follower.poll()} == {0}
    assert follower.poll() == []
    assert follower.notes() == []
    (tmp_path / "elsewhere").rename(second)
    assert {found["rank"] for found in follower.poll()} == {1}
    with first.open("a") as file:
        file.write(json.dumps(line("beat", step=4)) + "\n")
    assert [found["step"] for found in follower.poll()] == [4]


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=3, torn=2))
    os.mkfifo(tmp_path / "heartbeat_rank1.jsonl")
    follower = Follower([tmp_path])
    assert {found["rank"] for found in follower.poll()} == {0}
    notes = "\n".join(follower.notes())
    assert "cannot read" in notes
    assert "heartbeat_rank1.jsonl" in notes
    assert "2 lines skipped" in notes


# The command


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    }
    return kept | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | more


def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), cwd=cwd
    )


def test_once_prints_a_line_for_each_rank_and_ends(tmp_path: Path) -> None:
    write_run(tmp_path / "artifacts" / "train_showcase", Recording(steps=60, ranks=2))
    done = run("--once", cwd=tmp_path)  # the folder is the one a run writes to by default
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        len(
            re.findall(
                r"^rank [01]  step 60  loss \d\.\d+  .* tokens/s  data wait .*$", done.stdout, re.M
            )
        )
        == 2
    )
    assert "verdict: input-bound" in done.stdout
    assert "\x1b" not in done.stdout


def test_once_without_a_heartbeat_says_what_it_looked_for(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere", "--once", cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_terminal_it_waits_for_the_run_and_ends_with_it(tmp_path: Path) -> None:
    command = [*COMMAND, str(tmp_path / "run"), "--every", "0.2", "--until-end"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
    ) as child:
        try:
            assert child.stderr is not None
            assert "waiting for" in child.stderr.readline()
            write_run(tmp_path / "run", Recording(steps=40, ranks=2))
            out, rest = child.communicate(timeout=PATIENCE_S)
        finally:
            child.kill()
    assert child.returncode == 0, rest
    assert "rank 0  step 40" in out
    assert "rank 1  step 40" in out
    assert "ended: finished" in out


def test_until_end_does_not_wait_for_a_rank_that_was_killed(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=40, ranks=2, ended=False))  # and that was long ago
    done = run(tmp_path, "--until-end", cwd=tmp_path)
    assert done.returncode == 1
    assert "lost without a word: rank 0, 1" in done.stderr


class Terminal:
    """A real terminal, as far as the child can tell."""

    def __init__(self, width: int, height: int) -> None:
        self.ours, self.theirs = pty.openpty()
        self.seen = ""
        self.size(width, height)

    def size(self, width: int, height: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, wanted: str, child: subprocess.Popen[bytes]) -> str:
        """Read until something is shown; gives what came with it."""
        begun, deadline = len(self.seen), time.monotonic() + PATIENCE_S
        while not re.search(wanted, self.seen[begun:]):
            left = deadline - time.monotonic()
            ready = select.select([self.ours], [], [], max(0.0, min(1.0, left)))[0]
            if ready:
                self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")
            assert left > 0, f"{wanted!r} was not shown: {self.seen[-2000:]!r}"
            assert ready or child.poll() is None, f"it ended: {self.seen[-2000:]!r}"
        return self.seen[begun:]


@contextmanager
def watching(
    args: Sequence[str], width: int = 80, height: int = 24, **env: str
) -> Iterator[tuple[Terminal, Any]]:
    terminal = Terminal(width, height)
    # A session of its own takes the first terminal that it opens, and so Ctrl-C there reaches it.
    shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(terminal.theirs)]
    child = subprocess.Popen(
        [*shell, *COMMAND, *args], env=environment(**env), start_new_session=True
    )
    try:
        yield terminal, child
    finally:
        child.kill()
        child.wait()
        os.close(terminal.ours)
        os.close(terminal.theirs)


HOME, BACK, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def test_on_a_terminal_it_follows_the_run_and_the_size_and_ctrl_c_leaves_it_in_order(
    tmp_path: Path,
) -> None:
    with watching([str(tmp_path), "--every", "0.2"], width=120) as (terminal, child):
        terminal.until("waiting for", child)
        assert HOME in terminal.seen
        (path,) = write_run(tmp_path, Recording(steps=50, ended=False))
        terminal.until("last line", child)
        with path.open("a") as file:
            file.write(json.dumps(line("progress", step=1234, ts=time.time())) + "\n")
        assert "\x1b[1m" in terminal.until("1234", child)  # bold, so colours are on
        terminal.size(60, 24)
        os.kill(child.pid, signal.SIGWINCH)
        terminal.until("tok/s", child)
        os.write(terminal.ours, b"\x03")
        terminal.until(re.escape(BACK) + r"[\s\S]*1234", child)  # how it stood stays on the screen
        assert child.wait(PATIENCE_S) == 0
        assert CURSOR in terminal.seen
        assert "Traceback" not in terminal.seen


def test_it_serves_the_metrics_of_the_run_beside_it(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=50, ranks=2, ended=False))
    with watching([str(tmp_path), "--metrics-port", "0"]) as (terminal, child):
        terminal.until("tokens/s", child)
        url = re.search(r"http://127\.0\.0\.1:\d+/metrics", terminal.seen)
        assert url is not None
        with urllib.request.urlopen(url[0], timeout=PATIENCE_S) as reply:
            text = reply.read().decode()
        assert 'penstock_steps_total{rank="0"} 50.0' in text
        assert 'penstock_steps_total{rank="1"} 50.0' in text
        os.write(terminal.ours, b"\x03")
        assert child.wait(PATIENCE_S) == 0
