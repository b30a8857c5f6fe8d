"""`penstock watch`: a run while it runs, on a terminal or in a log."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import ConfigError, NoData

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.watch.live import RunView
    from penstock.watch.metrics import MetricsServer
    from penstock.watch.view.follow import Follower
    from penstock.watch.view.screen import Look

ON_TERMINAL_S, IN_LOG_S = 0.5, 10.0
POLL_S = 0.5
"""How often files are looked at, however rarely something is printed."""
EARLIER_EVENTS = 5
"""Events from before that a log begins with."""
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def watch(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HEARTBEAT",
            help="Files, globs or folders.",
            show_default="artifacts/train_showcase",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Show verdict and stages of this rank.",
            min=0,
            show_default="the slowest",
        ),
    ] = None,
    total_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Where the run ends, for progress and ETA: 2000000000, 2e9, 2B."
        ),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Between two looks.",
            min=0.1,
            show_default="0.5, without a terminal 10",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands, and end.")] = False,
    until_end: Annotated[
        bool,
        typer.Option(
            "--until-end", help="End when all ranks have: 0, or 1 if one was lost without a word."
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Serve metrics of the run to Prometheus at this port; 0 takes a free one.",
        ),
    ] = None,
    metrics_addr: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to serve them.")
    ] = "127.0.0.1",
) -> None:
    """Watch a run live: rates, data wait, queues, what happened.

    Ctrl-C ends it, with exit code 0. Needs nothing but the heartbeat files, which may not be there yet. Without a terminal it prints a line for each
    rank every ten seconds. Exit code 1: an error.
    """
    # A module is a file, and so is a rank: all that may be needed is imported before the first of those is open.
    import penstock.watch.steady
    import penstock.watch.view.screen  # noqa: F401
    from penstock.watch.heartbeat_reader import FOLDER, PATTERN
    from penstock.watch.live import RunView
    from penstock.watch.view.follow import Follower

    if once and (until_end or metrics_port is not None):
        raise ConfigError(
            "--once ends at once: it goes neither with --until-end nor with --metrics-port"
        )
    view = RunView(total_tokens=None if total_tokens is None else _count(total_tokens))
    with contextlib.ExitStack() as stack:
        follower = Follower(files or [str(FOLDER / PATTERN)])
        if once:
            _once(follower, view, rank)
            return
        server = stack.enter_context(_serving(metrics_port, metrics_addr))
        stack.enter_context(_terminated())
        on_terminal = _on_terminal()
        show = _Screen(follower, view, rank) if on_terminal else _Log(follower, view, rank)
        pause_s = every or (ON_TERMINAL_S if on_terminal else IN_LOG_S)
        lost = False
        with contextlib.suppress(KeyboardInterrupt), show:  # Ctrl-C is how one stops watching
            lost = _follow(follower, view, show.show, pause_s, server, until_end, on_terminal)
        if on_terminal:
            _draw(follower, view, rank)
        if lost:
            gone = ", ".join(str(r.rank) for r in view.in_order() if r.ended is None)
            typer.echo(f"lost without a word: rank {gone}", err=True)
            raise typer.Exit(1)


def _follow(
    follower: Follower,
    view: RunView,
    show: Callable[[], None],
    pause_s: float,
    server: MetricsServer | None,
    until_end: bool,
    on_terminal: bool,
) -> bool:
    """Look and show, in turns, until the run is over. True if a rank was lost."""
    due = time.monotonic()
    while True:
        for line in follower.poll():
            view.add(line)
            if server is not None:
                server.add(line)
        now = time.monotonic()
        over = until_end and not follower.behind and view.over(time.time())
        # A long history comes in pieces. A screen may show that, a log is to begin with how it stands.
        if over or (now >= due and (on_terminal or not follower.behind)):
            show()
            due = now + pause_s
        if over:
            return not view.ended
        if not follower.behind:
            time.sleep(max(0.0, min(POLL_S, due - time.monotonic())))


def _once(follower: Follower, view: RunView, rank: int | None) -> None:
    view.extend(follower.poll())
    while follower.behind:
        view.extend(follower.poll())
    if not view.ranks:
        files = ", ".join(map(str, follower.files))
        found = [f"no heartbeat line in {files}"] if files else []
        raise NoData("; ".join(found + follower.notes()))
    if _on_terminal():
        _draw(follower, view, rank)
    else:
        _Log(follower, view, rank).show()


def _draw(follower: Follower, view: RunView, rank: int | None) -> None:
    """How it stands, to stay on the screen."""
    from penstock.watch.view.screen import screen

    console = _console()
    console.print(screen(view, time.time(), _look(console, follower, view, rank)))


def _look(console: Console, follower: Follower, view: RunView, rank: int | None) -> Look:
    from penstock.watch.view.screen import Look

    notes = follower.notes()
    if rank is not None and view.ranks and rank not in view.ranks:
        notes.append(f"rank {rank} has not been heard of")
    width, height = console.size
    ascii = not console.encoding.startswith("utf")
    return Look(width=width, height=height, rank=rank, ascii=ascii, notes=tuple(notes))


class _Screen:
    """The live view. It has the terminal to itself, and leaves it as it was."""

    def __init__(self, follower: Follower, view: RunView, rank: int | None) -> None:
        from rich.live import Live

        self._follower, self._view, self._rank = follower, view, rank
        self._console = _console()
        # Drawn by this thread when there is something new: nothing runs in the background.
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self) -> None:
        from penstock.watch.view.screen import screen

        look = _look(self._console, self._follower, self._view, self._rank)
        self._live.update(screen(self._view, time.time(), look), refresh=True)


class _Log:
    """A line for each rank, each time."""

    def __init__(self, follower: Follower, view: RunView, rank: int | None) -> None:
        self._follower, self._view, self._rank = follower, view, rank
        self._noted: int | None = None
        self._said: list[str] = []

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *what: object) -> None:
        return

    def show(self) -> None:
        from penstock.watch.view.plain import event_line, plain

        notes = self._follower.notes()
        if notes != self._said:  # said when it changes, not every time
            self._said = notes
            for note in notes:
                typer.echo(note, err=True)
        events = self._view.events
        new = (
            events[-EARLIER_EVENTS:]
            if self._noted is None
            else [e for e in events if e.number > self._noted]
        )
        self._noted = self._view.noted
        for event in new:
            typer.echo(event_line(event))
        for line in plain(self._view, time.time(), self._rank):
            typer.echo(line)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _on_terminal() -> bool:
    from rich.console import Console

    return sys.stdout.isatty() and not Console().is_dumb_terminal


@contextlib.contextmanager
def _serving(port: int | None, addr: str) -> Iterator[MetricsServer | None]:
    if port is None:
        yield None
        return
    from penstock.watch.metrics import MetricsServer

    with MetricsServer(port, addr=addr, rank=0, setting="--metrics-port") as server:
        typer.echo(f"metrics at {server.url}", err=True)
        yield server


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """A kill leaves the terminal in order, too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _count(given: str) -> float:
    """A number of tokens as people write it."""
    written = re.fullmatch(
        r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?) ?([kKMBGT]?)", given.strip()
    )
    number = (
        0.0
        if written is None
        else float(re.sub("[_,]", "", written[1])) * COUNTS[written[2].upper()]
    )
    if number < 1:
        raise ConfigError(
            f"--total-tokens {given}: needs a number of tokens, such as 2000000000, 2e9 or 2B"
        )
    return number
