"""Datasets for worker processes, which import this module: it is light."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import numpy as np

from penstock.errors import missing_extra


class Rows:
    """Samples with their number and the process that made them.

    Asking for `deadly` kills the process, with a `marker` only once. Sample 20 is an `error`.
    """

    def __init__(
        self, n: int, deadly: int | None = None, marker: str = "", error: str = "", width: int = 1
    ) -> None:
        self.n, self.deadly, self.marker, self.error, self.width = n, deadly, marker, error, width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.deadly:
            with contextlib.suppress(FileExistsError):
                if self.marker:
                    open(self.marker, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if self.error and index == 20:
            raise_error(self.error)
        return {"x": index, "pid": os.getpid(), "wide": np.full(self.width, index)}


class Cores(Rows):
    """Samples with the core that the worker is pinned to, or -1 if it may use several."""

    def __getitem__(self, index: int) -> Any:
        allowed = os.sched_getaffinity(0)
        return np.array([[min(allowed) if len(allowed) == 1 else -1]])


class Doubles(Exception):
    """An exception that cannot be built from its own `args`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")
        self.name = name


def raise_error(kind: str) -> None:
    class Local(Exception):
        pass

    raise {
        "extra": missing_extra("zstandard", "reading .zst", "zst"),
        "local": Local("of a local class"),
        "doubles": Doubles("x"),
        "os": FileNotFoundError(2, "No such file", "a.txt"),
    }[kind]
