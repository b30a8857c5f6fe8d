"""The files of a folder on disk: all of them, each once, or an error.

In:    a folder.
Out:   the names of its files, below it.
Where: the thread that creates a dataset.
State: none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from penstock.errors import SourceError


def files_below(root: Path) -> Iterator[str]:
    """The names of all files below a folder, and below those that links in it lead to; in no order that means anything.

    A link to a folder that is read anyway leads nowhere new. What cannot be listed is an error: a run would go on with a part
    of its data, and nobody would know.
    """
    read = [os.path.realpath(root)]
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        # Hidden and underscored files are markers of other tools (.git, _SUCCESS, ._part-0).
        folders[:] = [
            name for name in _shown(sorted(folders)) if _leads_on(os.path.join(folder, name), read)
        ]
        for name in _shown(names):
            yield os.path.relpath(os.path.join(folder, name), root)


def size_of(path: Path) -> int:
    """In bytes."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        raise SourceError(
            f"{path} is a link to {os.readlink(path)}, and nothing is there. Mend it, or remove it."
        ) from None


def _shown(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith((".", "_"))]


def _leads_on(folder: str, read: list[str]) -> bool:
    """Whether to go into a folder: not by a link to one that is read where it lies, or that all of this lies in."""
    if not os.path.islink(folder):
        return True
    there = os.path.realpath(folder)
    if any(os.path.commonpath((there, known)) in (there, known) for known in read):
        return False
    read.append(there)
    return True


def _refuse(error: OSError) -> NoReturn:
    raise SourceError(
        f"{error.filename}: its files cannot be listed: {error.strerror}. See that it can be read, or name the files to be read."
    ) from error
