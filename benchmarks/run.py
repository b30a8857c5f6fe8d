"""Run every benchmark, each in a process of its own, one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = (
    "start", "first_batch", "latency", "throughput", "remote_throughput", "cached", "tokens", "mapstyle", "resume",
    "interference", "overhead", "autotune", "memory", "first_step", "train", "scale",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that they run, measures nothing"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SCRIPTS,
        default=SCRIPTS,
        metavar="NAME",
        help=", ".join(SCRIPTS),
    )
    args = parser.parse_args()
    here = Path(__file__).resolve().parent
    failed = []
    begun = time.monotonic()
    for name in args.only:
        command = [sys.executable, str(here / f"{name}.py"), *(["--quick"] if args.quick else [])]
        if subprocess.run(command).returncode:
            failed.append(name)
    print(
        f"# all in {time.monotonic() - begun:.0f} s"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
