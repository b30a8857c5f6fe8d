"""`penstock watch`: show a running run on a terminal or in a log."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY

from penstock.errors import SourceError
from penstock.options import option, options
from penstock.watch.heartbeat_reader import FOLDER, Follower


@options
class WatchOptions:
    """Options of `penstock watch`.

    files: Heartbeat files, globs or folders. Defaults to artifacts/train_showcase.
    rank: Show details of this rank.
    total_tokens: Tokens at which the run ends, such as 2e9.
    every: Seconds between updates. Defaults to 0.5, or to 10 without a terminal.
    once: Print the current state and exit.
    until_end: Exit when the run ends.
    metrics_port: Serve metrics to Prometheus on this port; 0 chooses a free one.
    metrics_addr: Address to serve on.
    """

    files: list[str] | None = None
    _: KW_ONLY
    rank: int | None = option(default=None, minimum=0)
    total_tokens: float | None = option(default=None, minimum=1)
    every: float | None = option(default=None, minimum=0.1)
    once: bool = False
    until_end: bool = False
    metrics_port: int | None = option(default=None, minimum=0, below=1 << 16)
    metrics_addr: str = "127.0.0.1"


def watch(given: WatchOptions) -> int:
    """Show a run live: rates, data wait, queues and events.

    Reads only the heartbeat files, which need not exist yet. Ctrl-C ends it.
    Without a terminal, it prints one line per rank every ten seconds.
    With --until-end, exit code 1 means that a rank was lost.
    """
    from rich.console import Console
    from rich.live import Live

    from penstock.watch.exporters import MetricsServer
    from penstock.watch.run import LiveView, Run

    once, files = given.once, given.files or [str(FOLDER)]
    follower = Follower(files)
    view = LiveView(Run(), total_tokens=given.total_tokens, rank=given.rank)
    console = Console(highlight=False)
    terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    pause_s = given.every or (0.5 if terminal else 10.0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # restores the terminal
    with ExitStack() as stack:
        server = live = None
        if given.metrics_port is not None:
            server = stack.enter_context(
                MetricsServer(given.metrics_port, given.metrics_addr, setting="--metrics-port")
            )
            print(f"metrics at {server.url}", file=sys.stderr)
        if terminal and not once:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        stack.enter_context(suppress(KeyboardInterrupt))
        over, due = False, 0.0
        while not over:
            for line in follower.poll():
                view.run.add(line)
                if server is not None:
                    server.add_line(line)
            notes, view.notes = view.notes, follower.notes()
            over = once or (given.until_end and view.over(time.time()))
            if live is not None:
                live.update(view.screen(time.time(), *console.size), refresh=True)
            elif not terminal and (over or time.monotonic() >= due):
                due = time.monotonic() + pause_s
                print("\n".join(view.plain(time.time())), flush=True)
                if view.notes != notes and not once:
                    print("\n".join(view.notes), file=sys.stderr)
            time.sleep(0.0 if over else min(0.5, pause_s))
    if once and not view.run.ranks:
        raise SourceError("; ".join([f"no heartbeat in {', '.join(files)}", *view.notes]))
    if terminal:
        console.print(view.screen(time.time(), *console.size))
    lost = [str(rank.rank) for rank in view.run.ranks.values() if rank.ended is None]
    if given.until_end and over and lost:
        print(f"lost: rank {', '.join(lost)}", file=sys.stderr)
        return 1
    return 0
