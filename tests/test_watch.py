"""`penstock watch`: what it shows of a run, on a real terminal and without one."""

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
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from penstock.watch.heartbeat_reader import Follower
from penstock.watch.run import COLUMNS, LiveView, Run
from tests.recorded import Recording, lines, write_run

COMMAND = (sys.executable, "-m", "penstock.cli.main", "watch")
PATIENCE_S = 60.0
"""How long something may take on a machine that has other things to do."""
NOW = 1_790_000_000.0


def line(msg: str, rank: int = 0, step: int = 0, ts: float = NOW, **fields: Any) -> dict[str, Any]:
    known = {"ts": ts, "iso": "2026-09-21T14:13:20.000Z", "mono": ts - NOW + 100.0, "pid": 1}
    return known | {"rank": rank, "step": step, "msg": msg} | fields


def view_of(recording: Recording, **options: Any) -> LiveView:
    return view_with(
        *(one for rank in range(recording.ranks) for one in lines(recording, rank)), **options
    )


def view_with(*told: dict[str, Any], **options: Any) -> LiveView:
    view = LiveView(Run(), **options)
    for one in told:
        view.run.add(one)
    return view


def last_ts(view: LiveView) -> float:
    return max(float(rank.last["ts"]) for rank in view.run.ranks.values())


def states(view: LiveView, now: float) -> dict[int, str]:
    return {rank.run.rank: rank.state() for rank in view.ranks(now)}


def cells(view: LiveView, now: float) -> dict[str, str]:
    return dict(zip(COLUMNS, view.chosen(now).cells(), strict=True))


def test_a_row_has_the_latest_numbers_of_its_rank() -> None:
    recording = Recording(steps=80, ended=False)
    view = view_of(recording)
    last = [found for found in lines(recording) if found["msg"] == "progress"][-1]
    row = cells(view, last_ts(view))
    assert (row["rank"], row["step"], row["state"]) == ("0", "80", "steady")
    assert float(row["loss"]) == pytest.approx(last["loss"], rel=1e-3)
    assert row["tokens/s"] == f"{last['toks_per_s']:,.0f}"
    assert row["queue"].endswith("/8")


def test_a_rank_without_a_line_for_ten_seconds_is_stale_until_it_writes_again() -> None:
    late = line("progress", rank=1, step=5, ts=NOW + 15)
    view = view_with(line("progress", step=5), late)
    assert states(view, NOW + 15) == {0: "stale", 1: "warming up"}
    assert view.chosen(NOW + 15).verdict() == "rank 0 has written nothing for 15 s"
    view.run.add(line("beat", step=5, ts=NOW + 16))
    assert states(view, NOW + 16)[0] == "warming up"


def test_a_stuck_step_is_shown_with_its_stage_and_file_until_the_next_step() -> None:
    waiting = {"stage": "fetch", "where": "part-3.parquet", "for_s": 7.5}
    view = view_with(
        line("progress", step=5, data_wait_pct=1.0),
        line("beat", step=5, waiting=waiting, verdict="fine"),
    )
    assert states(view, NOW) == {0: "waiting for fetch part-3.parquet"}
    assert view.chosen(NOW).verdict() == "waiting for fetch part-3.parquet for 7.5 s"
    view.run.add(line("progress", step=6, data_wait_pct=1.0))
    assert view.chosen(NOW).verdict() == "fine"


def test_progress_comes_from_the_tokens_or_the_steps_that_the_run_is_to_make() -> None:
    recording = Recording(steps=100, ranks=2, ended=False)
    share, words = view_of(recording, total_tokens=400.0 * recording.tokens).progress()
    assert share == 0.5
    assert words.startswith("step 100 of 200, 2")  # at 0.25 s a step
    assert f"{200 * recording.tokens:,} tokens" in words
    recording = Recording(steps=100, ended=False, settings={"max_steps": 400})
    assert view_of(recording).progress()[0] == 0.25
    assert view_of(Recording(steps=100)).progress()[0] is None


def test_a_run_is_over_when_all_ranks_have_ended_or_one_was_lost() -> None:
    view = view_with(line("progress", step=5), line("shutdown", rank=1, step=5, reason="finished"))
    assert not view_with().over(NOW)
    assert not view.over(NOW + 60)
    assert view.over(NOW + 400)
    view.run.add(line("shutdown", step=5, reason="finished"))
    assert view.over(NOW)
    view.run.add(line("boot", ts=NOW + 1))
    assert not view.over(NOW + 1)


def drawn(view: LiveView, now: float, width: int, height: int) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, height=height, highlight=False, color_system=None)
    console.print(view.screen(now, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("ranks", [1, 3, 40])
@pytest.mark.parametrize(("width", "height"), [(60, 14), (80, 24), (120, 40), (200, 60)])
def test_the_screen_fits_and_has_the_verdict_and_the_slowest_rank(
    width: int, height: int, ranks: int
) -> None:
    view = view_of(
        Recording(steps=70, ranks=ranks, stalls=(40,), ended=False, settings={"max_steps": 500})
    )
    shown = drawn(view, last_ts(view), width, height)
    assert max(map(cell_len, shown)) <= width
    assert any("input-bound" in text for text in shown)
    table = [text for text in shown if re.match(r" *\d+ +70 ", text)]
    slowest = view.chosen(last_ts(view)).run.rank
    assert any(re.match(rf" *{slowest} ", text) for text in table)
    if len(table) < ranks:
        assert f"and {ranks - len(table)} more ranks" in "\n".join(shown)


def test_an_escape_sequence_in_a_file_name_reaches_no_terminal() -> None:
    bad = "\x1b]0;owned\x07[bold]part\u202e\x9b31m.parquet\n"
    view = view_with(
        line("boot", host=bad),
        line("stall", stage=bad, where=bad, wait_s=1.0),
        line("beat", waiting={"stage": bad, "where": bad, "for_s": 2.0}),
        line("shutdown", rank=1, reason=bad),
    )
    shown = "\n".join([*drawn(view, NOW, 150, 24), *view.plain(NOW)])
    assert "[bold]part" in shown  # it is a name, not markup
    assert all(character.isprintable() or character == "\n" for character in shown)


# Which files


def test_files_that_come_later_are_picked_up_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower([tmp_path / "run"])
    assert list(follower.poll()) == []
    assert "waiting for" in follower.notes()[0]
    first, second = write_run(tmp_path / "run", Recording(steps=3, ranks=2))
    second.rename(tmp_path / "elsewhere")
    assert {found["rank"] for found in follower.poll()} == {0}
    assert list(follower.poll()) == []
    assert follower.notes() == []
    (tmp_path / "elsewhere").rename(second)
    assert {found["rank"] for found in follower.poll()} == {1}
    with first.open("a") as file:
        file.write(json.dumps(line("beat", step=4)) + "\n")
    assert [found["step"] for found in follower.poll()] == [4]


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


def test_more_ranks_than_files_may_be_open_are_all_shown(tmp_path: Path) -> None:
    write_run(tmp_path, Recording(steps=3, ranks=300, ended=False))
    limited = f"ulimit -n 256; exec {sys.executable} -m penstock.cli.main watch --once ."
    done = subprocess.run(
        ["sh", "-c", limited], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r"^rank \d+  step 3 ", done.stdout, re.M)) == 300


def test_once_prints_a_line_for_each_rank_and_ends(tmp_path: Path) -> None:
    write_run(tmp_path / "artifacts" / "train_showcase", Recording(steps=60, ranks=2))
    done = run("--once", cwd=tmp_path)  # the folder is the one a run writes to by default
    assert (done.returncode, done.stderr) == (0, "")
    row = r"^rank [01]  step 60  loss \d\.\d+  tokens/s .*  data wait .*  state ended: finished$"
    assert len(re.findall(row, done.stdout, re.M)) == 2
    assert "verdict: input-bound" in done.stdout
    assert "\x1b" not in done.stdout


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
    assert "lost: rank 0, 1" in done.stderr


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
        while not re.search(wanted, re.sub(r"\x1b\[[0-9;]*m", "", self.seen[begun:])):
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
        terminal.until("data wait +state", child)
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
