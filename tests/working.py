"""Work for pools: importable by worker processes, and light."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import MissingExtra


class Work:
    """Pure functions, and a few that a worker does not survive."""

    def __init__(self) -> None:
        self.calls = 0

    def square(self, x: int) -> int:
        return x * x

    def echo(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args

    def nap(self, x: Any, seconds: float) -> Any:
        time.sleep(seconds)
        return x

    def who(self) -> int:
        return os.getpid()

    def heeds_ctrl_c(self) -> tuple[bool, bool]:
        """Whether Ctrl-C is held back from this process, and whether it is ignored here."""
        blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return blocked, signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def thread(self) -> str:
        return threading.current_thread().name

    def cores(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def numbers(self, start: int, n: int) -> np.ndarray[Any, Any]:
        return np.arange(start, start + n, dtype=np.int64)

    def many(self, n: int) -> dict[str, Any]:
        return {"small": np.arange(3), "large": [np.full(n, i, dtype=np.int32) for i in range(5)]}

    def texts(self, n: int) -> pa.Array:
        return pa.array(
            [f"text {i} " + "x" * 50 if i % 7 else None for i in range(n)], pa.large_string()
        )

    def raw(self, n: int, value: int) -> bytes:
        return bytes([value]) * n

    def fail(self, message: str) -> None:
        error = ValueError(message)
        error.add_note("in stage decode")
        raise error

    def raise_(self, kind: str) -> None:
        class Local(Exception):
            pass

        unportable = Unportable("held")
        unportable.lock = threading.Lock()
        raise {
            "extra": MissingExtra("zstandard", "reading .zst", "zst"),
            "local": Local("of a local class"),
            "unportable": unportable,
            "doubles": Doubles("x"),
            "os": FileNotFoundError(2, "No such file", "a.txt"),
            "exit": SystemExit(4),
            "chained": Chained(1, key=2),
            "unloadable": Unloadable("gone"),
        }[kind]

    def unpicklable(self) -> Any:
        return lambda: 1

    def unloadable(self) -> Any:
        return OnlyInChild(os.getpid())

    def exit_at(self, address: Any, code: int) -> None:
        os._exit(code)

    def segfault(self) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)

    def die_once(self, marker: str, x: int) -> int:
        """Kills its process, unless somebody has done so before."""
        with contextlib.suppress(FileExistsError), open(marker, "x"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def garble(self) -> None:
        """Write to every socket this process has."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.write(int(name), b"nonsense" * 10)
        time.sleep(60)

    def sleep_once(self, marker: str, x: Any) -> Any:
        """Sleeps for long, unless somebody has done so before."""
        with contextlib.suppress(FileExistsError), open(marker, "x"):
            time.sleep(60)
        return x

    def hold_on(self, marker: str, over: str) -> None:
        """Leave a process behind that holds whatever this one has open until it is over, and die."""
        if os.path.exists(marker):
            return
        other = os.fork()
        if other == 0:
            deadline = time.monotonic() + 60
            while not os.path.exists(over) and time.monotonic() < deadline:
                time.sleep(0.05)
            os._exit(0)
        Path(marker).write_text(str(other))
        os.kill(os.getpid(), signal.SIGKILL)

    def stubborn(self, marker: str, seconds: float) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(marker).touch()
        time.sleep(seconds)

    def close_all(self) -> None:
        os.closerange(3, 256)


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


class Chained(Exception):
    def __init__(self, number: int, *, key: int) -> None:
        super().__init__(f"{number} of {key}")
        self.number, self.key = number, key


class Unportable(Exception):
    lock: Any = None


class Unloadable(Exception):
    def __reduce__(self) -> Any:
        return OnlyInChild, (os.getpid(),)


class OnlyInChild:
    """Can be loaded only where it was made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return only_here, (self.pid,)


def only_here(pid: int) -> OnlyInChild:
    if pid != os.getpid():
        raise LookupError("it was made elsewhere")
    return OnlyInChild(pid)


class FailsToLoad:
    def __reduce__(self) -> Any:
        return fails_to_load, ()


def fails_to_load() -> None:
    raise LookupError("there is no such table")


class KeepsTime:
    """Counts its ends in a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def ping(self) -> int:
        return 1

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")
