"""Checkpoints as they lie on disk.

In:    a folder of checkpoints; for a new one, the files that the ranks wrote into its partial folder.
Out:   a checkpoint that is whole or not there at all; `Saved`: what one is of, and each rank's own values.
Where: any process. Nothing here needs torch.
State: the files. A killed save leaves a hidden folder, which the next save removes.
Cost:  finding the newest reads that one once in each process that looks, for its checksums.

    step-00000100/   .metadata, __0_0.distcp, __1_0.distcp …   tensors and optimizer, by torch.distributed.checkpoint
                     rank-0.json, rank-1.json …                each rank's own values
                     meta.json                                 what it is of, and all other files; written last
    .step-…          one that is being written, replaced or removed

Checkpoints are trusted files. What is ours is JSON, but DCP (torch.distributed.checkpoint) keeps its `.metadata`, and
values that are no tensors, as pickles, and loading a pickle may run anything: load only what you or yours have saved.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, StateFormat

log = logging.getLogger("penstock")

VERSION = 1
META = "meta.json"

NAME = re.compile(r"step-(\d{8,})")
HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|replaced|gone)-[0-9a-f]+")
PIECE = 1 << 20

Files = dict[str, tuple[int, int]]
"""Of each file its size and crc32."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was looked at and is whole."""

    folder: Path
    step: int
    world_size: int
    settings: dict[str, Any]
    """What the trainer wanted to be known of the run."""
    ranks: list[dict[str, Any]]
    """Each rank's own values, in the order of ranks."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def newest(folder: Path | str) -> Saved | None:
    """The good one that was saved last, or None. One that is not good is skipped, and the log says why.

    Saved last, not furthest: after a run went back to an earlier checkpoint, later ones are of what it left behind.
    """
    for path in _candidates(Path(folder)):
        try:
            return load(path)
        except StateFormat as error:
            log.warning("skipped a checkpoint: %s", error)
    return None


def there_are(folder: Path | str) -> int:
    """How many checkpoints a folder has, good or not."""
    return len(_candidates(Path(folder)))


def load(folder: Path | str, *, checksums: bool = True) -> Saved:
    """One checkpoint by its path. Without `checksums` its files are only looked for and their sizes compared."""
    folder = Path(folder)
    meta = _meta(folder)
    for name, (size, crc) in meta.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise _bad(folder, f"{name} has {found} bytes and was saved with {size}")
            if checksums and (now := _crc(path)) != crc:
                raise _bad(
                    folder,
                    f"{name} was saved with crc32 {crc:08x} and has {now:08x}: its content has changed",
                )
        except OSError as error:
            raise _bad(folder, f"{name} cannot be read ({error})") from error
    own = [_object(folder, rank_name(rank)) for rank in range(meta.world_size)]
    return Saved(folder, meta.step, meta.world_size, meta.settings, own)


def prune(folder: Path | str, keep: int, *, checksums: bool = True) -> None:
    """Remove all but the `keep` good ones that were saved last, so never the only good one.

    What has no readable meta.json is not ours to judge, another release may have written it: it stays.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: at least one checkpoint has to be kept")
    good = 0
    for path in _candidates(Path(folder)):
        if _order(path) is None or HIDDEN.fullmatch(path.name):
            continue
        if good == keep:
            gone = _aside(
                path, "gone"
            )  # first out of everybody's sight, so that nobody sees half of one
            os.rename(path, gone)
            discard(gone)
            continue
        try:
            load(path, checksums=checksums)
            good += 1
        except StateFormat as error:
            log.warning("not counted among the checkpoints to keep: %s", error)


# How one is made: begin, files of all ranks, settle.


def begin(folder: Path, step: int) -> Path:
    """A hidden folder for a checkpoint to be written into. Leftovers of saves that were killed are removed, which is why
    one run at a time may write to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _sync(folder.parent)
    sweep(folder)
    partial = _aside(folder / name_of(step), "partial")
    partial.mkdir()
    return partial


def rank_name(rank: int) -> str:
    return f"rank-{rank}.json"


def sealed(path: Path) -> tuple[int, int]:
    """Bring a file that was written to the disk for good; its size and crc32."""
    # DCP calls fsync on `.metadata` before Python has handed its last bytes to the system, so it is done here for all.
    _sync(path)
    return path.stat().st_size, _crc(path)


def settle(partial: Path, final: Path, meta: Mapping[str, Any], files: Files) -> None:
    """Make a checkpoint of a partial folder: its meta.json, then its name. `meta`: step, world_size and settings."""
    there = {path.name for path in partial.iterdir()}
    if there != files.keys():
        raise OSError(
            f"{partial} should have {', '.join(sorted(files))} and has {', '.join(sorted(there))}: "
            "all ranks, on whichever host, have to write to the same folder"
        )
    serial = 1 + max(
        [order[0] for path in _candidates(final.parent) if (order := _order(path)) is not None],
        default=0,
    )
    whole = {
        "version": VERSION,
        **meta,
        "serial": serial,
        "files": {name: list(files[name]) for name in sorted(files)},
    }
    whole = json.loads(
        json.dumps(whole)
    )  # as it will be read: JSON turns numbers that are keys into text
    write(partial / META, json.dumps(whole | {"crc32": _own_crc(whole)}, indent=1))
    _sync(partial)
    old = _aside(final, "replaced") if final.exists() else None
    if old is not None:
        # A folder cannot be renamed over another. If we are killed in between, `newest` finds the old one aside.
        os.rename(final, old)
    try:
        os.rename(partial, final)
    except OSError:
        if old is not None:
            os.rename(old, final)
        raise
    _sync(final.parent)
    if old is not None:
        discard(old)


def write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove what killed saves and removals left; put back one that was to be replaced and was not."""
    for path in folder.iterdir():
        if (match := HIDDEN.fullmatch(path.name)) is None:
            continue
        final = folder / match[1]
        if match[2] == "replaced" and not final.exists():
            os.rename(path, final)
        else:
            discard(path)


def discard(hidden: Path) -> None:
    """Remove a hidden folder as far as possible. What stays does no harm, and the next save tries again."""
    try:
        shutil.rmtree(hidden)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s is no longer needed and cannot be removed: %s", hidden, error)


@dataclass(frozen=True)
class _Meta:
    step: int
    world_size: int
    serial: int
    settings: dict[str, Any]
    files: Files


def _meta(folder: Path) -> _Meta:
    if not folder.is_dir():
        raise _bad(folder, "there is no such folder")
    raw = _object(folder, META)
    version = raw.get("version")
    if version != VERSION:
        raise _bad(
            folder, f"{META} is of version {version!r}, and this release reads version {VERSION}"
        )
    if raw.pop("crc32", None) != _own_crc(raw):
        raise _bad(folder, f"{META} does not match its own crc32: its content has changed")
    try:
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        meta = _Meta(
            int(raw["step"]),
            int(raw["world_size"]),
            int(raw["serial"]),
            dict(raw["settings"]),
            files,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _bad(folder, f"{META} lacks something ({type(error).__name__}: {error})") from error
    lacking = {".metadata", *map(rank_name, range(meta.world_size))} - files.keys()
    if lacking or any(os.path.basename(name) != name for name in files):
        raise _bad(
            folder,
            f"{META} names {', '.join(files)}: that is no checkpoint of {meta.world_size} ranks",
        )
    return meta


def _object(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_bytes())
    except OSError as error:
        raise _bad(folder, f"{name} cannot be read ({error})") from error
    except ValueError as error:
        raise _bad(folder, f"{name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _bad(folder, f"{name} holds a {type(value).__name__} and no object")
    return value


def _candidates(folder: Path) -> list[Path]:
    """All that may be checkpoints, the last first. Those that cannot be put in order come before: any may be the last."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateFormat(
            f"{folder} cannot be searched for checkpoints ({error}). Give the folder that has the step-… folders."
        ) from error
    found = [path for path in paths if NAME.fullmatch(path.name)]
    names = {path.name for path in found}
    for path in paths:
        match = HIDDEN.fullmatch(path.name)
        if match is not None and match[2] == "replaced" and match[1] not in names:
            found.append(path)
    return sorted(
        found, key=lambda path: (_order(path) or (float("inf"), 0), path.name), reverse=True
    )


def _order(path: Path) -> tuple[int, int] | None:
    try:
        meta = _meta(path)
    except StateFormat:
        return None
    return meta.serial, meta.step


def _bad(folder: Path, why: str) -> StateFormat:
    return StateFormat(
        f"{folder} is not a checkpoint that can be loaded: {why}. "
        "Give the path of another one, or resume without a path to take the newest that is good."
    )


def _aside(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}-{secrets.token_hex(4)}")


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def _own_crc(meta: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_aside(folder: Path | str) -> Path | None:
    """Move the checkpoints of an earlier run out of the way of a new one. Gives where they are now, if there are any."""
    folder = Path(folder)
    if not _candidates(folder):
        return None
    for number in itertools.count(1):
        aside = folder.with_name(f"{folder.name}.{number}")
        if not aside.exists():
            try:
                os.rename(folder, aside)
            except OSError as error:  # a disk of its own that is mounted there, say
                raise ConfigError(
                    f"{folder} has checkpoints of an earlier run, and cannot be moved aside ({error.strerror}). Move what is in "
                    "it away, go on from it with --resume, or choose another --out."
                ) from error
            return aside
    raise AssertionError("numbers do not end")
