"""Every exception Penstock raises of its own accord.

    PenstockError
    ├── ConfigError            an argument or setting does not fit            (ValueError)
    ├── MissingExtra           an optional library is not installed           (ImportError)
    ├── SourceError            the data
    │   ├── NoData             nothing matches, or a reader would have nothing
    │   ├── CorruptFile        a file or a chunk of it cannot be read
    │   ├── RemoteError        it cannot be fetched, however often it was tried
    │   ├── AccessDenied       it is not for us, or not without a token
    │   ├── SourceChanged      it is not what it was
    │   ├── Offline            it is not on this machine, and the network is not to be used
    │   └── BadRecord          one document cannot be used
    ├── TokenizerError         the vocabulary
    ├── StateError             a saved state
    │   ├── StateFormat        it is not a state, or of a version we do not read
    │   └── StateMismatch      it belongs to other data, settings or ranks
    ├── UnevenRanks            ranks would get different numbers of batches
    ├── PeerFailed             another rank could not get its batch
    ├── FeedStopped            a rank has no data, and all ranks stop together
    ├── WorkerDied             a worker process ended in the middle of its work
    ├── LoaderTimeout          no batch within the time asked for             (TimeoutError)
    └── LoaderClosed           the loader was shut down while somebody waited

An exception raised by user code or by a library keeps its own type; a note says stage, file and row.
"""

from __future__ import annotations


class PenstockError(Exception):
    """The root of Penstock's own exceptions."""


class ConfigError(PenstockError, ValueError):
    """An argument or a setting does not fit."""


class MissingExtra(PenstockError, ImportError):
    """An optional library is needed and not installed."""

    def __init__(self, library: str, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs `{library}`, which is not installed: pip install 'penstock[{extra}]'"
        )


class SourceError(PenstockError):
    """The data cannot be had as asked for."""


class NoData(SourceError):
    """Nothing matches, or a reader would be left without anything to read."""


class CorruptFile(SourceError):
    """A file, or a chunk of it, cannot be read."""

    reason = "corrupt"


class RemoteError(SourceError):
    """Something remote cannot be fetched, however often it was tried."""


class AccessDenied(SourceError):
    """The server does not let us have it: a token, a permission or the acceptance of terms is missing."""


class SourceChanged(SourceError):
    """A file is not what it was when the run began or its state was saved."""


class Offline(SourceError):
    """It is not on this machine, and the network is not to be used."""


class BadRecord(SourceError):
    """One document cannot be used."""


class TokenizerError(PenstockError):
    """The vocabulary cannot be found, loaded or used."""


class StateError(PenstockError):
    """A saved state cannot be loaded."""


class StateFormat(StateError):
    """It is not a state, or of a version that this release does not read."""


class StateMismatch(StateError):
    """It belongs to other data, other settings or another number of ranks."""


class UnevenRanks(PenstockError):
    """The ranks would get different numbers of batches."""


class PeerFailed(PenstockError):
    """Another rank could not get its batch; its own error says why."""


class FeedStopped(PenstockError):
    """A rank has no data, so all ranks stop, with the same error."""

    def __init__(self, reason: str, step: int | None = None) -> None:
        before = f". All ranks stop together before step {step}." if step is not None else ""
        super().__init__(f"{reason}{before}")
        self.reason = reason


class WorkerDied(PenstockError):
    """A worker process ended, or was ended, in the middle of its work."""


class LoaderTimeout(PenstockError, TimeoutError):
    """No batch within the time asked for. Nothing is lost: ask again."""


class LoaderClosed(PenstockError):
    """The loader was shut down while somebody waited for it."""
