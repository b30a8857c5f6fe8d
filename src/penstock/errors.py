"""The exceptions that Penstock raises itself.

    PenstockError
    ├── ConfigError        an argument, a setting or the installation is wrong    (ValueError)
    ├── SourceError        the data is missing, refused, changed or cannot be used
    │   ├── RemoteError    a fetch failed after all retries, or the network is disabled
    │   └── CorruptFile    a file, or a chunk of it, cannot be read
    ├── StateError         a saved state is invalid, or belongs to other data
    ├── WorkerDied         a worker process exited during a task
    ├── PeerFailed         another rank failed, and all ranks stop together
    ├── LoaderTimeout      no batch within the timeout                            (TimeoutError)
    └── LoaderClosed       the loader was shut down during a call

An exception of user code or of a library keeps its type; a note names stage, file and row.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PenstockError(Exception):
    """Base class of all exceptions of Penstock."""


class ConfigError(PenstockError, ValueError):
    """An argument or setting is invalid, a vocabulary cannot be used, or a library is missing. The
    message names it and says what would be valid."""


def missing_extra(library: str, needed_for: str, extra: str) -> ConfigError:
    """Return the error for an optional library that is not installed."""
    return ConfigError(
        f"{needed_for} needs `{library}`, which is not installed: pip install 'penstock[{extra}]'"
    )


class SourceError(PenstockError):
    """The data is missing, access to it is refused, it has changed, or a record cannot be used."""


class RemoteError(SourceError):
    """A fetch failed after all retries, or the network is disabled."""


class CorruptFile(SourceError):
    """A file, or a chunk of it, cannot be read."""

    reason = "corrupt"


class StateError(PenstockError):
    """A saved state is invalid, or belongs to other data, settings or ranks."""


class WorkerDied(PenstockError):
    """A worker process exited, or was killed, during a task."""


class PeerFailed(PenstockError):
    """Another rank failed to get its batch or has no data, so all ranks stop."""


class LoaderTimeout(PenstockError, TimeoutError):
    """No batch within the timeout. Nothing is lost: call again."""


class LoaderClosed(PenstockError):
    """The loader was shut down during the call."""


def unknown(where: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest known one."""
    known = sorted(known)
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"{where}: unknown; {hint}")
