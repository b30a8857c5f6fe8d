"""One contender in a fresh process and in its own environment, under the driver's eyes.

In:    what to do, and a case, on the command line. A line on stdin lets it end.
Out:   JSON lines on stdout: `first` with the monotonic time of the first batch; `done` with what was measured; `error`.
       Whatever else the contender prints goes to stderr.
Where: started by the driver, which reads memory and CPU time of the process and its children from outside.

drain:  all batches, as fast as they come, or as many as were asked for; `steady` tells that batch `--after` has come, from
        which on the rate is measured.
pace:   a consumer that waits a while after each batch, as one does whose accelerator computes.
follow: a digest of each batch; the state after batch `--save-at` goes to a file.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

from case import BATCH_SIZE, SEQ_LEN, Case, NotOffered, Stream

TOKENS = BATCH_SIZE * SEQ_LEN


class Run:
    """One stream, and what is told of it."""

    def __init__(self, case: Case, out: TextIO) -> None:
        self._out = out
        self._case = case
        module = importlib.import_module(f"contenders.{case.contender}")
        self._stream: Stream = module.stream(case)
        self._given = 0
        self.took = 0.0
        """By the last call for a batch; looking at it not counted."""

    def next(self) -> tuple[Any, Any] | None:
        """The next batch, looked at; None at the end."""
        asked = time.perf_counter()
        try:
            inputs, targets = next(self._stream)
        except StopIteration:
            return None
        self.took = time.perf_counter() - asked
        if tuple(inputs.shape) != (BATCH_SIZE, SEQ_LEN) or tuple(targets.shape) != (
            BATCH_SIZE,
            SEQ_LEN,
        ):
            raise ValueError(
                f"{self._case.contender} gave {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        int(inputs[0].sum())
        int(targets[-1, -1])
        if not self._given:
            self.tell("first", at=time.monotonic())
        self._given += 1
        return inputs, targets

    def drain(self, batches: int, after: int) -> None:
        """As fast as they come. Up to batch `after` a contender may still be loading what it needs."""
        begun = ended = time.perf_counter()
        while self._given < batches and self.next() is not None:
            ended = time.perf_counter()
            if self._given == after:
                self.tell("steady")
                begun = time.perf_counter()
        counted = max(0, self._given - after)
        self.tell("done", seconds=ended - begun, tokens=counted * TOKENS, batches=self._given)

    def pace(self, batches: int, pause_s: float) -> None:
        """With a pause after each. The first ones are not counted: the loader is filling up."""
        before = min(5, batches // 4)
        fetches = []
        begun = time.perf_counter()
        for step in range(batches):
            if step == before:
                begun = time.perf_counter()
            if self.next() is None:
                break
            if step >= before:
                fetches.append(self.took)
            time.sleep(pause_s)
        self.tell("done", seconds=time.perf_counter() - begun, fetches=fetches, batches=self._given)

    def follow(self, batches: int, save_at: int, save_to: str) -> None:
        """With a digest of each."""
        digests = []
        while self._given < batches and (batch := self.next()) is not None:
            digests.append(digest(batch))
            if self._given == save_at:
                state = self._stream.state()
                if state is None:
                    raise NotOffered("it has no state")
                with open(save_to, "wb") as file:
                    pickle.dump(state, file)
        self.tell("done", digests=digests, batches=self._given)

    def tell(self, what: str, **more: Any) -> None:
        """One line to the driver."""
        print(json.dumps({"what": what} | more), file=self._out, flush=True)

    def close(self) -> None:
        """Let the stream go."""
        self._stream.close()


def digest(batch: tuple[Any, Any]) -> str:
    """Of the ids of a batch, whatever holds them."""
    import numpy as np

    return hashlib.blake2b(
        b"".join(np.ascontiguousarray(np.asarray(part), np.int64).tobytes() for part in batch),
        digest_size=12,
    ).hexdigest()


def main() -> None:
    """Do what the driver asks for."""
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
                print(
                    json.dumps({"what": "done", "seconds": time.perf_counter() - begun}),
                    file=out,
                    flush=True,
                )
                return
            run = Run(args.case, out)
            if args.what == "drain":
                run.drain(args.batches, args.after)
            elif args.what == "pace":
                run.pace(args.batches, args.pause_s)
            else:
                run.follow(args.batches, args.save_at, args.save_to)
            sys.stdin.readline()  # the driver looks at memory and CPU time while all of it is there
            run.close()
        except NotOffered as error:
            print(json.dumps({"what": "not offered", "why": str(error)}), file=out, flush=True)
        except Exception as error:
            traceback.print_exc()
            told = {
                "what": "error",
                "kind": type(error).__name__,
                "why": str(error),
                "at": time.monotonic(),
            }
            print(json.dumps(told), file=out, flush=True)
            sys.exit(1)


if __name__ == "__main__":  # worker processes that are spawned import this file again
    main()
