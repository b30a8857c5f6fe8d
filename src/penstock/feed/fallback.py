"""Ranks go on together: with data, without it, or not at all.

In:    a loader that is being opened, and what the other ranks have.
Out:   for each step either the batches of this rank, which all ranks then have too; or made-up ones, on all ranks
       at once; or the end; or one error that is the same everywhere.
Where: the trainer's thread, on all ranks in step. Opening and reopening happen on a thread of their own.
State: batches that this rank has and others have not, which are kept for the step at which all have theirs; where the
       stream stood after the last batch that was trained on; from when to when data was substituted.
Cost:  one collective of two integers a step over a small group on the CPU; nothing with a single rank.

A rank asks for data only as long as its limit allows, then tells the others that it has none. So nobody enters one of
training's collectives while another rank still waits for a batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from penstock.encode.batch import Batch
from penstock.errors import (
    AccessDenied,
    BadRecord,
    ConfigError,
    FeedStopped,
    LoaderTimeout,
    MissingExtra,
    NoData,
    SourceChanged,
    StateError,
    TokenizerError,
)
from penstock.feed.opening import Opening
from penstock.feed.ranks import Alone, Peers

log = logging.getLogger("penstock")

FATAL, FAILED, STALLED, ENDED, READY = range(5)
"""What a rank has to tell, from the worst to the best. The worst that any of them tells decides."""

MISTAKES = (ConfigError, MissingExtra, StateError, TokenizerError, SourceChanged, BadRecord)
"""These are no faults that pass. To train on made-up data instead would hide them."""
AT_FIRST = (NoData, AccessDenied)
"""So are these, as long as no batch has come: a wrong name, a missing token. Later, a server may have its hiccups."""

RETRY_S, RETRY_MOST_S = 5.0, 60.0
"""A loader that failed is opened again after so long, then after twice as long, and so on."""


class Loader(Protocol):
    """What is needed of an `AsyncDataLoader`."""

    def start(self) -> Any: ...
    def next_batch(self, timeout: float | None = None) -> Batch | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...
    def shutdown(self) -> None: ...


class Interrupted(BaseException):
    """Somebody wants this rank to stop waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long to wait, and what then."""

    on_stall: Literal["stop", "synthetic"] = "stop"
    first_timeout_s: float = 60.0
    """For the first batch: listing files and loading a vocabulary included."""
    stall_timeout_s: float = 300.0
    """For every other one. A larger value lets more faults pass by themselves, while all ranks wait."""


@dataclass(slots=True)
class Substitution:
    """Steps that ran on made-up data."""

    first: int
    last: int
    reason: str


class Turn(NamedTuple):
    """What all ranks do next."""

    batches: list[Batch]
    """This rank's, as many as were asked for; none where the run ends."""
    ended: bool = False
    stop: bool = False
    """A rank was told to stop. What it and others had read is not lost: the state is that before it."""


class _Vote(NamedTuple):
    code: int
    text: str = ""
    error: Exception | None = None


class SharedFeed:
    """The batches of one rank, handed out when all ranks have theirs."""

    def __init__(
        self,
        make: Callable[[], Loader],
        limits: Limits,
        *,
        event: Callable[..., None] = lambda msg, **fields: None,
        prefix: str = "loader_",
        blame: Callable[[float], str] = lambda seconds: "",
        resumed: list[dict[str, Any]] | None = None,
        substituted: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Begin to open a loader: `make` creates it, and runs on another thread.

        event: is told of a fallback, as a heartbeat is; and of errors, whose name begins with `prefix`.
        blame: says what was waited for in the last so many seconds.
        resumed: the states of all ranks that `make` loads, kept in case it never comes to that.
        substituted: what was, before the run was resumed.
        """
        self._make, self._limits, self._event, self._blame = make, limits, event, blame
        self._resumed, self._prefix = resumed, prefix
        self._peers: Peers = Alone()
        self._substitute: Callable[[int, int], Batch] | None = None
        self._loader: Loader | None = None
        self._reopened: Loader | None = None
        """The loader that is being opened again: it knows which batches it has handed out."""
        self._held: deque[Batch] = deque()
        self._first: dict[str, Any] | None = None
        """Where the loader began."""
        self._after: Callable[[], dict[str, Any]] | None = None
        self._started = False
        self._asked_at: float | None = None
        self._waiting = self._interrupted = False
        self._failure: _Vote | None = None
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self.substitutions = [Substitution(**each) for each in substituted]
        self.substituting = False
        self.opened_at = time.perf_counter()
        self._opening = self._open(self._fresh)

    def join(self, peers: Peers, substitute: Callable[[int, int], Batch] | None = None) -> None:
        """The other ranks are there. `substitute(step, n)` makes the n-th batch of a step without data."""
        self._peers, self._substitute = peers, substitute

    def _open(self, make: Callable[[], Loader]) -> Opening[Loader]:
        return Opening(make, lambda loader: loader.shutdown())

    def _fresh(self) -> Loader:
        loader = self._make()
        loader.start()
        return loader

    # One step

    def next(self, step: int, count: int = 1, *, stopping: bool = False) -> Turn:
        """The batches of a step, or what else all ranks do. All ranks call it at the same point of their run."""
        vote = self._ask(count) if not stopping else _Vote(STALLED, "was told to stop")
        votes = self._peers.gather([vote.code, int(stopping or self._interrupted)])
        if any(told[1] for told in votes):
            return Turn([], stop=True)
        worst = min(told[0] for told in votes)
        if worst == READY:
            return Turn(self._real(step, count))
        if worst == ENDED:
            return Turn([], ended=True)
        reason = self._reason([told[0] for told in votes], vote)
        if worst == FATAL or self._limits.on_stall == "stop" or self._substitute is None:
            if vote.code == STALLED:  # an error has been told where it was met
                self._event(f"{self._prefix}error", error=reason, stage="stall", where=vote.text)
            raise FeedStopped(reason, step) from vote.error
        return Turn(self._made_up(step, count, reason))

    def _ask(self, count: int) -> _Vote:
        """What this rank has. Waits as long as it may; not at all while data is substituted."""
        if self._failure is not None:
            if time.monotonic() < self._retry_at:
                return self._failure
            self._reopen()
        limits = self._limits
        limit_s = limits.stall_timeout_s if self._started else limits.first_timeout_s
        left_s = 0.0 if self.substituting else limit_s if self._started else self.left_s()
        try:
            self._waiting = True
            try:
                done = self._fill(count, time.monotonic() + left_s)
            finally:
                self._waiting = False
        except Interrupted:
            self._interrupted = True
            return _Vote(STALLED, "was told to stop")
        except LoaderTimeout as timeout:
            blame = self._blame(min(limit_s, 1.0)) if self._loader is not None else str(timeout)
            return _Vote(
                STALLED,
                f"no batch within {limit_s:g} s ({blame})"
                if blame
                else f"no batch within {limit_s:g} s",
            )
        except Exception as error:
            return self._failed(error)
        if not done:
            return _Vote(ENDED)
        self._retry_s = RETRY_S
        return _Vote(READY)

    def _fill(self, count: int, deadline: float) -> bool:
        """Hold so many batches. False at the end of the stream."""
        while len(self._held) < count:
            if self._loader is None:
                self._loader = self._opening.result(max(0.0, deadline - time.monotonic()))
                if self._first is None:
                    self._first = self._loader.state_dict()
            batch = self._loader.next_batch(timeout=max(0.0, deadline - time.monotonic()))
            if batch is None:
                return False
            self._held.append(batch)
        return True

    def _failed(self, error: Exception) -> _Vote:
        text = f"{type(error).__name__}: {error}"
        if self._loader is None:
            self._event(f"{self._prefix}error", error=text[:1000], stage="open", where="")
        mistake = isinstance(error, MISTAKES if self._started else MISTAKES + AT_FIRST)
        self._failure = _Vote(FATAL if mistake else FAILED, text, error)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
        return self._failure

    def _reopen(self) -> None:
        """Try again, on another thread: to end what is left of the last try may take a while."""
        # If that fails too, it is still this loader's turn: a new one would begin at the beginning.
        loader = self._reopened = self._reopened if self._loader is None else self._loader
        self._loader = self._failure = None

        def again() -> Loader:
            assert loader is not None
            loader.shutdown()
            loader.start()  # after the last batch that it handed out: those that are held among them
            return loader

        self._opening = self._open(self._fresh if loader is None else again)

    def _reason(self, codes: list[int], vote: _Vote) -> str:
        texts = self._peers.texts(vote.text)
        without = [rank for rank, code in enumerate(codes) if code < ENDED]
        who = " and ".join(f"rank {rank}" for rank in without[:4]) + (
            " and others" if len(without) > 4 else ""
        )
        worst = min(without, key=lambda rank: codes[rank])
        told = (texts[worst] if len(without) == 1 else f"rank {worst}: {texts[worst]}").rstrip(".")
        return (
            f"{who} of {self._peers.world} had no data: {told}"
            if self._peers.world > 1
            else f"no data: {told}"
        )

    def _real(self, step: int, count: int) -> list[Batch]:
        batches = [self._held.popleft() for _ in range(count)]
        self._after = batches[-1].state_maker()
        self._started = True
        if self.substituting:
            self.substituting = False
            since = self.substitutions[-1]
            told = f"all ranks have data again after {since.last - since.first + 1} steps without"
            log.warning("step %d: %s", step, told)
            self._event("fallback", to="data", reason=told, at_step=step)
        return batches

    def _made_up(self, step: int, count: int, reason: str) -> list[Batch]:
        assert self._substitute is not None
        if not self.substituting:
            self.substituting = True
            self.substitutions.append(Substitution(step, step, reason))
            log.warning(
                "step %d: %s. All ranks go on with SYNTHETIC data until all have theirs",
                step,
                reason,
            )
            self._event("fallback", to="synthetic", reason=reason, at_step=step)
        self.substitutions[-1].last = step
        return [self._substitute(step, n) for n in range(count)]

    # From outside

    def interrupt(self) -> None:
        """Stop waiting. For a signal handler, which runs on the trainer's thread."""
        if self._waiting:
            raise Interrupted

    def left_s(self) -> float:
        """How long the first batch may still take: the time runs from when it was first asked for."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        return max(0.0, self._limits.first_timeout_s - (time.monotonic() - self._asked_at))

    def loader(self) -> Loader | None:
        """The loader, once it is open; None if it failed or is not open in time: `next` will tell of that."""
        if self._loader is None and self._failure is None:
            try:
                return self._opening.result(self.left_s())
            except Exception:
                return None  # it is raised again by the `next` that needs it
        return self._loader

    def rewind(self) -> None:
        """Begin again where the loader began, on another thread, so that batches stand ready when they are asked for."""
        loader, state = self._loader, self._first
        if loader is None or state is None:
            return
        self._loader = self._after = None
        self._held.clear()

        def again() -> Loader:
            loader.load_state_dict(state)
            loader.start()
            return loader

        self._opening = self._open(again)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch that was trained on, and what was substituted: JSON."""
        position: Any = self._after() if self._after is not None else self._first or self._resumed
        return {"loader": position, "substituted": [asdict(each) for each in self.substitutions]}

    def close(self) -> None:
        """Shut the loader down. Harmless again."""
        self._held.clear()
        self._opening.close()
        if self._loader is not None:
            self._loader.shutdown()


def states_of(saved: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The loaders' states in what all ranks saved with `state_dict`; None for a run that had not begun to read."""
    states: list[Any] = [one.get("loader") for one in saved]
    whole: list[dict[str, Any]] | None = next(
        (each for each in states if isinstance(each, list)), None
    )
    if whole is not None:  # a rank that never got to open its loader kept what it was to begin with
        return whole
    return None if any(each is None for each in states) else states
