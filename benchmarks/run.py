"""Run all benchmarks in sequence, each in its own process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = {"common", "corpora", "limit", "report", "run"}
SCRIPTS = sorted({path.stem for path in HERE.glob("*.py")} - SHARED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME")
    args = parser.parse_args()
    begun = time.monotonic()
    failed = []
    for name in args.only:
        command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if args.quick else [])]
        if subprocess.run(command).returncode:
            failed.append(name)
    words = f"; failed: {', '.join(failed)}" if failed else ""
    print(f"# all in {time.monotonic() - begun:.0f} s{words}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
