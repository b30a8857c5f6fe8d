"""What runs in a worker process.

In:    a work object, then the names of its methods with their arguments, one after the other.
Out:   for each the result, or the exception with its traceback as text.
Where: the main thread of the child; a second one ends the process when the parent is gone.
State: the work object, which may keep caches.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from typing import Any, NamedTuple

from penstock.feed.affinity import pin
from penstock.feed.channel import Broken, End, dump, loads
from penstock.watch.spans import Report


class Reply(NamedTuple):
    """What the child says: first that it has begun, then once for each call."""

    value: Any
    error: bytes | None = None
    """The exception, pickled so that the parent can load it."""
    traceback: str = ""
    report: Report | None = None
    """What the call spent its time on."""


def main(end: End, cpus: frozenset[int] | None) -> None:
    """Serve one parent until it closes its end, or is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # as it was started; what the work starts is to heed it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_parent, name="penstock-parent", daemon=True).start()
    work: Any = None
    with contextlib.suppress(Broken):
        try:
            if cpus is not None:
                pin(cpus)
            work = loads(end.receive())
        except Broken:
            raise
        except BaseException as error:
            end.send(_failed(error))
            return
        end.send(Reply(os.getpid()))
        _serve(end, work)
    if hasattr(work, "close"):
        work.close()


def _serve(end: End, work: Any) -> None:
    clock = getattr(work, "clock", None)
    track = clock.track() if clock is not None and clock.on else None
    while True:
        value = method = args = None  # an idle worker must not keep the last chunk alive
        try:
            method, args = end.receive()
            value = getattr(work, method)(*args)
        except Broken:
            raise
        except BaseException as error:  # it belongs to whoever waits for the result
            end.send(_failed(error))
            continue
        try:
            end.send(Reply(value, report=track.report() if track is not None else None))
        except Broken:
            raise
        except BaseException as error:
            error.add_note(
                f"what {method} gave, a {type(value).__name__}, cannot be sent out of its worker process"
            )
            end.send(_failed(error))


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


# Exceptions


def _failed(error: BaseException) -> Reply:
    story = traceback.TracebackException.from_exception(error)
    story.__notes__ = None  # they travel with the exception
    text = "".join(story.format()).rstrip()
    return Reply(None, portable(error), text)


def portable(error: BaseException) -> bytes:
    """An exception pickled in the first way that gives it back as it was."""
    for make in (lambda: error, lambda: Remade(error), lambda: Remade(error, only_portable=True)):
        with contextlib.suppress(Exception):
            pickled = bytes(dump(make(), None)[0])
            again = loads(pickled)
            if type(again) is type(error) and str(again) == str(error):
                return pickled
    plain = RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {_text(error)}")
    for note in getattr(error, "__notes__", ()):
        plain.add_note(str(note))
    return bytes(dump(plain, None)[0])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


class Remade:
    """An exception that is made again without its `__init__`, which may want other arguments."""

    def __init__(self, error: BaseException, only_portable: bool = False) -> None:
        self._kind = type(error)
        self._args: tuple[Any, ...] = error.args
        self._attributes = dict(vars(error))
        if only_portable:
            self._args = error.args if _can_go(error.args) else (str(error),)
            self._attributes = {
                name: value for name, value in self._attributes.items() if _can_go(value)
            }

    def __reduce__(self) -> tuple[Any, ...]:
        return remake, (self._kind, self._args, self._attributes)


def remake(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    """An exception of this kind, its fields set by the nearest base that Python itself defines."""
    error = (
        BaseException.__new__(kind)
        if kind.__new__ is BaseException.__new__
        else kind.__new__(kind, *args)
    )
    native: Any = next(c for c in kind.__mro__ if c.__module__ == "builtins")
    with contextlib.suppress(TypeError):
        native.__init__(error, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _can_go(value: Any) -> bool:
    try:
        loads(dump(value, None)[0])
    except Exception:
        return False
    return True
