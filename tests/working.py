"""Work for pools: importable by worker processes, and light."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import numpy as np

from penstock.errors import missing_extra


class Work:
    """Pure functions, and a few that a worker does not survive."""

    def __init__(self) -> None:
        self.calls = 0

    def square(self, x: int) -> int:
        return x * x

    def echo(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args

    def who(self) -> int:
        return os.getpid()

    def thread(self) -> str:
        return threading.current_thread().name

    def cores(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def numbers(self, start: int, n: int) -> np.ndarray[Any, Any]:
        return np.arange(start, start + n, dtype=np.int64)

    def fail(self, message: str) -> None:
        error = ValueError(message)
        error.add_note("in stage decode")
        raise error

    def raise_(self, kind: str) -> None:
        class Local(Exception):
            pass

        raise {
            "extra": missing_extra("zstandard", "reading .zst", "zst"),
            "local": Local("of a local class"),
            "doubles": Doubles("x"),
            "os": FileNotFoundError(2, "No such file", "a.txt"),
            "exit": SystemExit(4),
        }[kind]

    def exit_at(self, address: Any, code: int) -> None:
        os._exit(code)


class Rows:
    """A map-style dataset. Asking for `deadly` kills the process, with a `marker` only once."""

    def __init__(
        self, n: int, deadly: int | None = None, marker: str = "", error: str = ""
    ) -> None:
        self.n, self.deadly, self.marker, self.error = n, deadly, marker, error

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == self.deadly:
            with contextlib.suppress(FileExistsError):
                if self.marker:
                    open(self.marker, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if self.error and index == 20:
            Work().raise_(self.error)
        return {"x": index, "pid": os.getpid()}


class Doubles(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")
        self.name = name


class FailsToLoad:
    def __reduce__(self) -> Any:
        return fails_to_load, ()


def fails_to_load() -> None:
    raise LookupError("there is no such table")
