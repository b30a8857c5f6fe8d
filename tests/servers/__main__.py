"""Run a loopback Hub as a process of its own: `python -m tests.servers hub --dir FOLDER --repo NAME`.

Prints its address as the first line, and ends on SIGTERM or Ctrl-C. With `--log` it then writes a JSON
line for each request, without secrets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from penstock.config import write_atomically
from tests.servers.hub import HubServer
from tests.servers.reply import Call


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.servers")
    parser.add_argument("server", choices=["hub"])
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="the folder to serve")
    add("--repo", required=True, help="the name of the dataset: org/name")
    add("--copies", type=int, default=0, help="serve its files in turn under N names")
    add("--latency-ms", type=float, default=0.0, help="waited before each answer")
    add("--bandwidth-mb", type=float, default=0.0, help="MB/s of all connections together")
    add("--log", type=Path, help="write the requests into this file at the end")
    return parser.parse_args(arguments)


def find(folder: Path, copies: int) -> dict[str, Path]:
    """The files of a folder by the names under which they are served."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    if not copies:
        return found
    card = {name: path for name, path in found.items() if name == "README.md"}
    data = itertools.cycle(path for name, path in found.items() if name not in card)
    for number, path in zip(range(copies), data, strict=False):
        card[f"data/train-{number:05d}-of-{copies:05d}{path.suffix}"] = path
    return card


def line(call: Call) -> str:
    """A request for the log, without what would let its reader in."""
    names = ("time", "port", "connection", "method", "path", "range", "status", "sent", "fault")
    return json.dumps({name: getattr(call, name) for name in names}) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    # Before the address is known, so that no signal can be too early.
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    bandwidth = options.bandwidth_mb * 1e6 or None
    with HubServer(latency_s=options.latency_ms / 1e3, bandwidth=bandwidth) as server:
        server.add(options.repo, find(options.dir, options.copies))
        print(server.endpoint, flush=True)
        ended.wait()
        log = server.log
    if options.log:
        write_atomically(options.log, "".join(map(line, log)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
