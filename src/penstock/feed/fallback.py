"""Before each step, all ranks agree on real batches, synthetic batches, the end, or an error.

Each rank waits for its batches up to its time limit, then votes; the worst vote decides for all
ranks. So no rank enters a collective of training while another waits for data. A rank that has its
batches keeps them until all ranks have data, so no row is lost or repeated. Costs one collective of
two integers per step. A background thread opens and reopens loaders.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from penstock import errors
from penstock.encode.batch import Batch
from penstock.feed.collectives import Ranks

if TYPE_CHECKING:
    from penstock.loader import AsyncDataLoader as Loader

log = logging.getLogger("penstock")

T = TypeVar("T")

FATAL, FAILED, STALLED, ENDED, READY = range(5)
"""Votes, from worst to best."""


class FeedStopped(errors.PeerFailed):
    """All ranks stop at the same step, so that they can save a checkpoint together."""


RETRY_S = 10.0
"""Time after which a failed loader is reopened."""

CLOSE_S = 1.0
OPEN_THREAD = "penstock-open"


class BackgroundOpen(Generic[T]):
    """Runs `make` on a new thread, starting at once."""

    def __init__(self, make: Callable[[], T], dispose: Callable[[T], None] | None = None) -> None:
        """`dispose` closes the result of `make`, even if `make` returns after `close`."""
        self._make, self._dispose = make, dispose
        self._opened: Future[T] = Future()
        # A daemon, because `make` may still wait for a server when the program ends.
        self._thread = threading.Thread(target=self._run, name=OPEN_THREAD, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._opened.set_result(self._make())
        except BaseException as error:
            self._opened.set_exception(error)

    def result(self, timeout_s: float | None = None) -> T:
        """Return the result, or raise its error. After `LoaderTimeout`, call again."""
        try:
            self._opened.exception(timeout_s)
        except TimeoutError:
            raise errors.LoaderTimeout(
                f"the data was not opened within {timeout_s:.3g} s: its files are still being listed, "
                "or its vocabulary is still loading. Check that the server can be reached, or allow more time."
            ) from None
        return self._opened.result()

    def close(self) -> None:
        """Dispose of the result, now or when it is ready. Wait a second for the thread."""
        self._opened.add_done_callback(self._dispose_of)
        self._thread.join(CLOSE_S)

    def _dispose_of(self, opened: Future[T]) -> None:
        if self._dispose is not None and opened.exception() is None:
            self._dispose(opened.result())


class Interrupted(BaseException):
    """Raised by a signal handler to stop waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long to wait for a batch, and what to do after that."""

    on_stall: Literal["stop", "synthetic"] = "stop"
    first_timeout_s: float = 60.0
    """For the first batch, including listing files and loading a vocabulary."""
    stall_timeout_s: float = 300.0
    """For every other batch. A larger value tolerates longer faults, while all ranks wait."""


@dataclass(slots=True)
class Substitution:
    """A range of steps that ran on synthetic data."""

    first: int
    last: int
    reason: str


class Turn(NamedTuple):
    """The decision of all ranks for a step."""

    batches: list[Batch]
    """This rank's batches for the step; empty if the run ends."""
    ended: bool = False
    stop: bool = False
    """A rank was asked to stop. The state excludes batches that were read for this step."""


class _Vote(NamedTuple):
    code: int
    text: str = ""
    error: Exception | None = None


class SharedFeed:
    """Returns the batches of one rank in steps in which all ranks have data."""

    def __init__(
        self,
        make: Callable[[], Loader],
        limits: Limits,
        *,
        event: Callable[..., None] = lambda msg, **fields: None,
        blame: Callable[[float], str] = lambda seconds: "",
        resumed: list[dict[str, Any]] | None = None,
        substituted: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Start opening a loader: `make` creates it on another thread.

        event: called with `fallback` and `loader_error`.
        blame: returns what the loader waited for in the given number of last seconds.
        resumed: the states of all ranks that `make` loads; saved again if no loader opens.
        substituted: substitutions of the resumed run.
        """
        self._make, self._limits, self._event, self._blame = make, limits, event, blame
        self._resumed = resumed
        self._ranks = Ranks()
        self._synthetic: Callable[[int, int], Batch] | None = None
        self._loader: Loader | None = None
        """The latest loader. While `_opening` is set, only that may use it."""
        self._held: deque[Batch] = deque()
        self._first: dict[str, Any] | None = None
        """The state at which the loader started."""
        self._state: Callable[[], dict[str, Any]] | None = None
        self._started = False
        self._asked_at: float | None = None
        self._waiting = self._interrupted = False
        self._failure: _Vote | None = None
        self._retry_at = 0.0
        self.substitutions = [Substitution(**each) for each in substituted]
        self.substituting = False
        self._opening: BackgroundOpen[Loader] | None = None
        self._open()

    def join(self, ranks: Ranks, synthetic: Callable[[int, int], Batch] | None = None) -> None:
        """Set the ranks that decide. `synthetic(step, n)` makes the n-th batch of a step."""
        self._ranks, self._synthetic = ranks, synthetic

    def next(self, step: int, count: int = 1, *, stopping: bool = False) -> Turn:
        """Return the decision for a step, with this rank's batches. All ranks must call this."""
        vote = _Vote(STALLED) if stopping else self._vote(count)
        votes = self._ranks.gather([vote.code, int(stopping or self._interrupted)])
        codes = [code for code, _ in votes]
        if any(stops for _, stops in votes):
            return Turn([], stop=True)
        if min(codes) == READY:
            return Turn(self._real(step, count))
        if min(codes) == ENDED:
            return Turn([], ended=True)
        reason = self._reason(codes, vote)
        if min(codes) == FATAL or self._limits.on_stall == "stop" or self._synthetic is None:
            if vote.code == STALLED:  # other errors were reported where they occurred
                self._event("loader_error", error=reason, stage="stall", where=vote.text)
            raise FeedStopped(
                f"{reason}. All ranks stop together before step {step}."
            ) from vote.error
        self._substitute(step, reason)
        return Turn([self._synthetic(step, n) for n in range(count)])

    def _vote(self, count: int) -> _Vote:
        """Return this rank's vote on a step. Does not wait while data is substituted."""
        if self._failure is not None:
            if time.monotonic() < self._retry_at:
                return self._failure
            self._failure = None
            self._open()
        limit_s, left_s = self._limits.first_timeout_s, self.left_s()
        if self._started:
            limit_s = left_s = self._limits.stall_timeout_s
        if self.substituting:
            left_s = 0.0
        try:
            self._fill(count, time.monotonic() + left_s)
        except Interrupted:
            self._interrupted = True
            return _Vote(STALLED)
        except errors.LoaderTimeout as timeout:
            opened = self._opening is None
            blame = self._blame(min(limit_s, 1.0)) if opened else str(timeout)
            return _Vote(STALLED, f"no batch within {limit_s:g} s" + (blame and f" ({blame})"))
        except Exception as error:
            return self._fail(error)
        return _Vote(READY if len(self._held) >= count else ENDED)

    def _fill(self, count: int, deadline: float) -> None:
        """Buffer `count` batches, or fewer at the end of the stream."""
        self._waiting = True
        try:
            loader = self._opened(deadline)
            while len(self._held) < count:
                batch = loader.next_batch(timeout=max(0.0, deadline - time.monotonic()))
                if batch is None:
                    return
                self._held.append(batch)
        finally:
            self._waiting = False

    def _opened(self, deadline: float) -> Loader:
        if self._opening is not None:
            self._loader = self._opening.result(max(0.0, deadline - time.monotonic()))
            self._opening = None
            if self._first is None:
                self._first = self._loader.state_dict()
        assert self._loader is not None
        return self._loader

    def _open(self) -> None:
        """Open the loader, or reopen it after the last batch it returned."""
        loader = self._loader

        def start() -> Loader:
            opened = self._make() if loader is None else loader
            opened.shutdown()
            opened.start()
            return opened

        self._opening = BackgroundOpen(start, lambda opened: opened.shutdown())

    def _fail(self, error: Exception) -> _Vote:
        text = f"{type(error).__name__}: {error}"
        if self._opening is not None:
            self._event("loader_error", error=text[:1000], stage="open", where="")
        # A permanent error stops the run, because synthetic data would hide it.
        mistake = isinstance(error, errors.ConfigError | errors.StateError)
        mistake = mistake or type(error) is errors.SourceError
        self._failure = _Vote(FATAL if mistake else FAILED, text, error)
        self._retry_at = time.monotonic() + RETRY_S
        return self._failure

    def _reason(self, codes: list[int], vote: _Vote) -> str:
        """Return the reason on all ranks: how many have no data, and why the worst has none."""
        worst, world = codes.index(min(codes)), len(codes)
        why = self._ranks.gather_texts(vote.text)[worst].rstrip(".")
        if world == 1:
            return f"no data: {why}"
        without = sum(code < ENDED for code in codes)
        return f"{without} of {world} ranks had no data; rank {worst}: {why}"

    def _real(self, step: int, count: int) -> list[Batch]:
        batches = [self._held.popleft() for _ in range(count)]
        self._state = batches[-1].state_maker()
        self._started = True
        if self.substituting:
            self.substituting = False
            since = self.substitutions[-1]
            reason = f"all ranks have data again after {since.last - since.first + 1} steps without"
            log.warning("step %d: %s", step, reason)
            self._event("fallback", to="data", reason=reason, at_step=step)
        return batches

    def _substitute(self, step: int, reason: str) -> None:
        if not self.substituting:
            self.substituting = True
            self.substitutions.append(Substitution(step, step, reason))
            log.warning(
                "step %d: %s. All ranks use SYNTHETIC data until all have real data", step, reason
            )
            self._event("fallback", to="synthetic", reason=reason, at_step=step)
        self.substitutions[-1].last = step

    def interrupt(self) -> None:
        """Stop waiting. Called by a signal handler on the trainer's thread."""
        if self._waiting:
            raise Interrupted

    def left_s(self) -> float:
        """Return the time left for the first batch, counted from the first request."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        return max(0.0, self._limits.first_timeout_s - (time.monotonic() - self._asked_at))

    def loader(self) -> Loader | None:
        """Return the loader, or None if it failed or does not open in time."""
        try:
            return self._opened(time.monotonic() + self.left_s())
        except Exception:
            return None  # `next` raises it again and reports it

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last real batch, and all substitutions, as JSON."""
        position: Any = self._state() if self._state is not None else self._first or self._resumed
        return {"loader": position, "substituted": [asdict(each) for each in self.substitutions]}

    def close(self) -> None:
        """Shut the loader down. Safe to call again."""
        self._held.clear()
        if self._opening is not None:
            self._opening.close()
        elif self._loader is not None:
            self._loader.shutdown()


def loader_states(saved: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the loader states that all ranks saved, or None if a rank saved none."""
    states: list[Any] = [each.get("loader") for each in saved]
    for state in states:
        if isinstance(state, list):  # saved by a rank whose loader never opened
            return state
    return None if None in states else states
