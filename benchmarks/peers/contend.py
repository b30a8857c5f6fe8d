"""Run one contender in a fresh process and in its own environment, observed by the driver.

Prints JSON lines: `first` with the monotonic time of the first batch, `steady`, and at the end
`done`, `not offered` or `error`. What the contender itself prints goes to stderr. A line on stdin
lets it end.

drain:  take all batches as fast as they come, or as many as asked for; the rate is measured from
        batch `--after` on.
pace:   wait after each batch, as for an accelerator.
follow: print a digest of each batch; write the state after batch `--save-at` to a file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from case import BATCH_SIZE, SEQ_LEN, TOKENS, Case, NotOffered, Pair, Stream


class Run:
    """One stream, and what is reported of it."""

    def __init__(self, case: Case, out: TextIO) -> None:
        self._out = out
        module = importlib.import_module(f"contenders.{case.contender}")
        self.stream: Stream = module.stream(case)
        self._given = 0
        self._took = 0.0
        """Seconds of the last call for a batch."""

    def _next(self) -> Pair | None:
        asked = time.perf_counter()
        pair = next(self.stream.batches, None)
        self._took = time.perf_counter() - asked
        if pair is None:
            return None
        inputs, targets = pair
        if {tuple(inputs.shape), tuple(targets.shape)} != {(BATCH_SIZE, SEQ_LEN)}:
            raise ValueError(f"batches of {tuple(inputs.shape)} and {tuple(targets.shape)}")
        int(inputs[0].sum()), int(targets[-1, -1])
        if not self._given:
            tell(self._out, "first", at=time.monotonic())
        self._given += 1
        return inputs, targets

    def drain(self, args: argparse.Namespace) -> None:
        begun = ended = time.perf_counter()
        while self._given < args.batches and self._next() is not None:
            ended = time.perf_counter()
            if self._given == args.after:
                tell(self._out, "steady")
                begun = time.perf_counter()
        tokens = max(0, self._given - args.after) * TOKENS
        tell(self._out, "done", seconds=ended - begun, tokens=tokens, batches=self._given)

    def pace(self, args: argparse.Namespace) -> None:
        """The first batches are not counted: the loader is filling up."""
        fetches, before = [], min(5, args.batches // 4)
        begun = time.perf_counter()
        for step in range(args.batches):
            if step == before:
                begun = time.perf_counter()
            if self._next() is None:
                break
            if step >= before:
                fetches.append(self._took)
            time.sleep(args.pause_s)
        tell(self._out, "done", seconds=time.perf_counter() - begun, fetches=fetches)

    def follow(self, args: argparse.Namespace) -> None:
        digests = []
        while self._given < args.batches and (pair := self._next()) is not None:
            digests.append(digest(pair))
            if self._given == args.save_at:
                if self.stream.state is None:
                    raise NotOffered("it has no state")
                Path(args.save_to).write_bytes(pickle.dumps(self.stream.state()))
        tell(self._out, "done", digests=digests)


def digest(pair: Pair) -> str:
    """Hash the ids of a batch."""
    import numpy as np

    parts = [np.ascontiguousarray(np.asarray(part), np.int64).tobytes() for part in pair]
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


def tell(out: TextIO, what: str, **more: Any) -> None:
    """Print one line for the driver."""
    print(json.dumps({"what": what} | more), file=out, flush=True)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=("drain", "pace", "follow", "prepare"))
    options.add_argument("case", type=Case.read)
    options.add_argument("--batches", type=int, default=sys.maxsize)
    options.add_argument("--after", type=int, default=1)
    options.add_argument("--pause-s", type=float, default=0.0)
    options.add_argument("--save-at", type=int, default=0)
    options.add_argument("--save-to", default="")
    args = options.parse_args()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print is not for the driver
        try:
            if args.what == "prepare":
                begun = time.perf_counter()
                importlib.import_module(f"contenders.{args.case.contender}").prepare(args.case)
                tell(out, "done", seconds=time.perf_counter() - begun)
                return
            run = Run(args.case, out)
            getattr(run, args.what)(args)
            sys.stdin.readline()  # the driver reads memory and CPU time while everything is there
            run.stream.close()
        except NotOffered as error:
            tell(out, "not offered", why=str(error))
        except Exception as error:
            traceback.print_exc()
            tell(out, "error", kind=type(error).__name__, why=str(error))
            sys.exit(1)


if __name__ == "__main__":  # worker processes that are spawned import this file again
    main()
