"""The exceptions that Penstock raises itself.

    PenstockError
    ├── ConfigError            an argument or setting is invalid              (ValueError)
    ├── MissingExtra           an optional library is not installed           (ImportError)
    ├── SourceError            the data
    │   ├── NoData             no file matches, or a reader would get no data
    │   ├── CorruptFile        a file, or a chunk of it, cannot be read
    │   ├── RemoteError        a fetch failed after all retries
    │   ├── AccessDenied       a token, a permission or accepted terms are missing
    │   ├── SourceChanged      a file changed during the run or since the checkpoint
    │   ├── Offline            data is not on this machine and the network is disabled
    │   └── BadRecord          a document cannot be used
    ├── TokenizerError         the vocabulary cannot be found, loaded or used
    ├── StateError             a saved state
    │   ├── StateFormat        not a state, or an unsupported version
    │   └── StateMismatch      a state of other data, settings or ranks
    ├── UnevenRanks            ranks would get different numbers of batches
    ├── PeerFailed             another rank failed to get its batch
    ├── FeedStopped            a rank has no data, and all ranks stop together
    ├── WorkerDied             a worker process exited during a task
    ├── LoaderTimeout          no batch within the timeout                    (TimeoutError)
    └── LoaderClosed           the loader was shut down during a call

An exception of user code or of a library keeps its type; a note names stage, file and row.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of all exceptions here."""


class ConfigError(PenstockError, ValueError):
    """An argument or setting is invalid. The message names it, its value and what would fit."""


class MissingExtra(PenstockError, ImportError):
    """An optional library is needed and not installed."""

    def __init__(self, library: str, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs `{library}`, which is not installed: pip install 'penstock[{extra}]'"
        )


class SourceError(PenstockError):
    """The data cannot be read."""


class NoData(SourceError):
    """No file matches, or a reader would get no data."""


class CorruptFile(SourceError):
    """A file, or a chunk of it, cannot be read."""

    reason = "corrupt"


class RemoteError(SourceError):
    """A fetch failed after all retries."""


class AccessDenied(SourceError):
    """The server refuses access: a token, a permission or accepted terms are missing."""


class SourceChanged(SourceError):
    """A file changed since the run began or its state was saved."""


class Offline(SourceError):
    """The data is not on this machine, and the network is disabled."""


class BadRecord(SourceError):
    """A document cannot be used."""


class TokenizerError(PenstockError):
    """The vocabulary cannot be found, loaded or used."""


class StateError(PenstockError):
    """A saved state cannot be loaded."""


class StateFormat(StateError):
    """The value is not a state, or has an unsupported version."""


class StateMismatch(StateError):
    """The state belongs to other data, other settings or another number of ranks."""


class UnevenRanks(PenstockError):
    """The ranks would get different numbers of batches."""


class PeerFailed(PenstockError):
    """Another rank failed to get its batch; its own error says why."""


class FeedStopped(PenstockError):
    """A rank has no data, so all ranks stop with the same error."""

    def __init__(self, reason: str, step: int | None = None) -> None:
        before = f". All ranks stop together before step {step}." if step is not None else ""
        super().__init__(f"{reason}{before}")
        self.reason = reason


class WorkerDied(PenstockError):
    """A worker process exited, or was killed, during a task."""


class LoaderTimeout(PenstockError, TimeoutError):
    """No batch within the timeout. Nothing is lost: call again."""


class LoaderClosed(PenstockError):
    """The loader was shut down during the call."""
