"""Run a loopback server as a process of its own: `python -m tests.servers hub|files --dir FOLDER`.

In:    a folder, and options for latency, bandwidth and faults.
Out:   the address, as the first line on stdout; with `--log`, a JSON line for each request, written at the end.
Where: a process that ends on SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from penstock.config import write_atomically
from penstock.errors import ConfigError
from tests.servers.faults import KINDS, SURVIVABLE, Chaos
from tests.servers.files import FileServer
from tests.servers.hub import HubServer
from tests.servers.reply import Request


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers", description="Servers on loopback, with faults."
    )
    commands = parser.add_subparsers(dest="server", required=True)
    hub = commands.add_parser("hub", help="a stand-in for the Hugging Face Hub, with one dataset")
    files = commands.add_parser("files", help="a plain HTTP server of files")
    for command in (hub, files):
        add = command.add_argument
        add("--dir", type=Path, required=True, help="the folder to serve")
        add(
            "--copies",
            type=int,
            default=0,
            help="serve its files in turn under N names, data/train-00000-of-N…",
        )
        add("--latency-ms", type=float, default=0.0, help="waited before each answer")
        add(
            "--connect-latency-ms",
            type=float,
            default=0.0,
            help="waited once more on a new connection",
        )
        add(
            "--bandwidth-mb",
            type=float,
            default=0.0,
            help="MB/s (of 10^6 bytes) of all connections together",
        )
        add("--port", type=int, default=0, help="where to listen; a free port if not given")
        add("--port-file", type=Path, help="write the address into this file as well")
        add(
            "--log", type=Path, help="write the requests into this file at the end, without secrets"
        )
        add(
            "--fault-rate",
            type=float,
            default=0.0,
            help="the share of requests that a fault strikes",
        )
        add("--fault-kinds", default=",".join(SURVIVABLE), help=f"of: {', '.join(KINDS)}")
        add("--seed", type=int, default=0, help="of the faults")
    hub.add_argument("--repo", required=True, help="the name of the dataset: org/name")
    hub.add_argument("--page-size", type=int, default=1000, help="items on a page of a listing")
    hub.add_argument(
        "--no-redirect", action="store_true", help="serve large files by the first port as well"
    )
    return parser.parse_args(arguments)


def find(folder: Path, copies: int) -> dict[str, Path]:
    """The files of a folder by the names under which they are served."""
    if not folder.is_dir():
        raise ConfigError(f"--dir {folder}: there is no such folder")
    found = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    if not copies:
        return found
    card = {name: path for name, path in found.items() if name == "README.md"}
    data = [path for name, path in found.items() if name not in card]
    if not data:
        raise ConfigError(f"{folder} has no files that could be served {copies} times")
    names = (f"data/train-{number:05d}-of-{copies:05d}" for number in range(copies))
    return card | {
        name + path.suffix: path for name, path in zip(names, itertools.cycle(data), strict=False)
    }


def serve(options: argparse.Namespace) -> HubServer | FileServer:
    latency_s, connect_s = options.latency_ms / 1e3, options.connect_latency_ms / 1e3
    bandwidth = options.bandwidth_mb * 1e6 or None
    files = find(options.dir, options.copies)
    if options.server == "files":
        return FileServer(
            files,
            latency_s=latency_s,
            connect_latency_s=connect_s,
            bandwidth=bandwidth,
            port=options.port,
        )
    hub = HubServer(
        latency_s=latency_s, connect_latency_s=connect_s, bandwidth=bandwidth,
        page_size=options.page_size, redirect=not options.no_redirect, port=options.port,
    )  # fmt: skip
    hub.add(options.repo, files)
    return hub


def line(request: Request) -> str:
    """A request for the log, without what would let its reader in."""
    shown = dataclasses.asdict(request)
    shown["query"] = re.sub(r"(?<=Signature=)[^&]*", "hidden", request.query)
    if "authorization" in request.headers:
        shown["headers"]["authorization"] = "hidden"
    return json.dumps(shown) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    # Before the address is known, so that nobody can be too early.
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        server = serve(options)
        with server:
            if options.fault_rate:
                kinds = options.fault_kinds.split(",")
                server.fault(Chaos(options.seed, options.fault_rate, kinds))
            address = server.endpoint if isinstance(server, HubServer) else server.url
            print(address, flush=True)
            if options.port_file:
                write_atomically(options.port_file, address + "\n")
            ended.wait()
            log = server.log
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.log:
        write_atomically(options.log, "".join(map(line, log)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
