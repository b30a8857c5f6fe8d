"""`penstock watch`: show a run while it runs, on a terminal or in a log."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import Annotated

import typer

from penstock.cli.health import HEARTBEATS, option
from penstock.errors import ConfigError, SourceError

TOTAL = option("N", "Tokens at which the run ends, such as 2e9.", min=1)
EVERY = option("SECONDS", "Time between updates; 0.5, without a terminal 10.", min=0.1)
PORT = option("N", "Serve metrics to Prometheus on this port; 0 picks one.")


def watch(
    files: Annotated[list[str] | None, HEARTBEATS] = None,
    rank: Annotated[int | None, option("N", "Show details of this rank.", min=0)] = None,
    total_tokens: Annotated[float | None, TOTAL] = None,
    every: Annotated[float | None, EVERY] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    until_end: Annotated[bool, typer.Option("--until-end", help="Exit with the run.")] = False,
    metrics_port: Annotated[int | None, PORT] = None,
    metrics_addr: Annotated[str, option("ADDRESS", "Address to serve on.")] = "127.0.0.1",
) -> None:
    """Show a run live: rates, data wait, queues and events.

    Reads only the heartbeat files, which need not exist yet. Ctrl-C ends it.
    Without a terminal it prints one line for each rank every ten seconds.
    With --until-end, exit code 1 means that a rank was lost.
    """
    from rich.console import Console
    from rich.live import Live

    from penstock.watch.exporters import MetricsServer
    from penstock.watch.heartbeat_reader import FOLDER, Follower
    from penstock.watch.live import LiveView
    from penstock.watch.run import Run

    if once and (until_end or metrics_port is not None):
        raise ConfigError("--once cannot be combined with --until-end or --metrics-port")
    follower = Follower(files or [FOLDER])
    view = LiveView(Run(), total_tokens=total_tokens, rank=rank)
    console = Console(highlight=False)
    terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    pause_s = every or (0.5 if terminal else 10.0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the terminal in order
    with contextlib.ExitStack() as stack:
        server = live = None
        if metrics_port is not None:
            server = stack.enter_context(
                MetricsServer(metrics_port, metrics_addr, setting="--metrics-port")
            )
            typer.echo(f"metrics at {server.url}", err=True)
        if terminal and not once:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        over, due = False, 0.0
        while not over:
            for line in follower.poll():
                view.run.add(line)
                if server is not None:
                    server.add(line)
            if follower.behind:
                continue
            notes, view.notes = view.notes, follower.notes()
            over = once or (until_end and view.over(time.time()))
            if live is not None:
                live.update(view.screen(time.time(), *console.size), refresh=True)
            elif not terminal and (over or time.monotonic() >= due):
                due = time.monotonic() + pause_s
                for text in view.plain(time.time()):
                    typer.echo(text)
                for note in view.notes if view.notes != notes and not once else ():
                    typer.echo(note, err=True)
            time.sleep(0.0 if over else min(0.5, pause_s))
    if once and not view.run.ranks:
        raise SourceError(
            "; ".join([f"no heartbeat in {', '.join(files or [str(FOLDER)])}", *view.notes])
        )
    if terminal:
        console.print(view.screen(time.time(), *console.size))
    lost = [rank.rank for rank in view.run.ranks.values() if rank.ended is None]
    if until_end and over and lost:
        typer.echo(f"lost: rank {', '.join(map(str, lost))}", err=True)
        raise typer.Exit(1)
