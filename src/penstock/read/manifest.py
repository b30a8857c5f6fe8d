"""List the files that a dataset consists of.

In:    a path, a folder, a glob, an address elsewhere, or a list of these.
Out:   `FileRef`s in a fixed order, and a fingerprint of names, sizes and ETags.
Where: the thread that creates the dataset.
State: none. No file is opened. Remote listings are kept on disk by their fingerprints, so that a
       later run whose data changed can say which file it was.
Cost:  one `stat` a local file; what is elsewhere is asked for by `listing.RemoteListing`.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError, NoData
from penstock.read.walk import files_below, size_of
from penstock.types import Codec, FileRef, Format, Member, MiB, version_change

if TYPE_CHECKING:
    from penstock.read.hub import Entry
    from penstock.read.kept import Kept
    from penstock.read.listing import RemoteListing

FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
}
CODECS: dict[str, Codec] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}

BUNDLE_BYTES = 4 * MiB
BUNDLE_FILES = 1024
"""Small text files are read this many at a time: one task for each would cost more than its text."""


def classify(name: str) -> tuple[Format, Codec] | None:
    """Format and compression by the file's endings, or None where they say nothing."""
    stem, ending = os.path.splitext(name.lower())
    codec = CODECS.get(ending, "")
    if codec:
        ending = os.path.splitext(stem)[1]
    kind = FORMATS.get(ending)
    return (kind, codec) if kind else None


def list_files(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: Format | None = None,
    whole: bool = True,
    remote: RemoteListing | None = None,
) -> tuple[FileRef, ...]:
    """The files behind `urls`, each once, in the order given and by name within a folder or glob.

    With `whole`, a plain-text file is one document, and small ones are bundled. `remote` lists what is
    not on disk; without it, only what is on disk can be listed.
    """
    try:
        sources = (
            [urls] if isinstance(urls, str | os.PathLike) else [os.fspath(url) for url in urls]
        )
    except TypeError:
        # Not shown: it may have addresses with logins in it.
        kinds = [urls] if isinstance(urls, bytes) or not isinstance(urls, Iterable) else list(urls)
        wrong = next(
            (type(one).__name__ for one in kinds if not isinstance(one, str | os.PathLike)), "this"
        )
        raise ConfigError(f"{wrong} is no path, folder, glob or list of these") from None
    if not sources:
        raise NoData("no data: the list of paths is empty. Name a file, a folder or a glob.")
    paths = [os.fspath(source) for source in sources]
    # All at once: what is far away is asked for side by side.
    away = (
        remote.files_of([path for path in paths if remote.takes(path)], format)
        if remote is not None
        else {}
    )
    found: dict[str, FileRef] = {}
    for path in paths:
        for file in away[path] if path in away else _expand(path, format):
            found.setdefault(file.path if file.remote else os.path.realpath(file.path), file)
    files = tell_apart(list(found.values()))
    listed = tuple(_bundle(files) if whole else files)
    if away and remote is not None:
        remember(remote.kept, listed)
    return listed


def _expand(source: str, format: Format | None) -> Iterable[FileRef]:
    if not source:
        raise ConfigError(
            "no data: an address is empty; a folder, also the one we are in, has a name such as ."
        )
    if "://" in source:
        if not source.startswith("file://"):
            scheme = source.partition("://")[0]
            raise ConfigError(
                f"{source}: cannot read {scheme}:// yet. Give a path on disk or file://…"
            )
        source = source.removeprefix("file://")
    path = Path(source).expanduser()
    if path.is_file():
        known = _file(path, path.name, format)
        if known is None:
            raise unknown_format(str(path))
        yield known
        return
    if path.is_dir():
        root, names = path, sorted(files_below(path))
    else:
        root = _fixed_part(path)
        matches = glob.glob(str(path), recursive=True)
        names = sorted(os.path.relpath(m, root) for m in matches if os.path.isfile(m))
        if not names:
            what = "matches no file" if glob.has_magic(str(path)) else "does not exist"
            raise NoData(f"{path} {what} (looked from {Path.cwd()})")
    files = [f for name in names if (f := _file(root / name, name, format)) is not None]
    if not files:
        raise no_known_ending(str(path), len(names))
    yield from files


def no_known_ending(where: str, count: int) -> NoData:
    """Files are there, and none that we can read."""
    return NoData(
        f"{where}: none of its {count} files has an ending we know ({' '.join(FORMATS)}, "
        f"each also {' '.join(CODECS)}). Name the format: TextDataset(…, format='jsonl')"
    )


def unknown_format(path: str) -> ConfigError:
    """A file was named whose name does not say what it is."""
    return ConfigError(
        f"{path}: cannot tell its format from its name. Name it: TextDataset(…, format='parquet')"
    )


def tell_apart(files: list[FileRef]) -> list[FileRef]:
    """Files of one name, from different folders, are named by as much of their path as it takes."""
    out = list(files)
    parents = 0
    while len(same := [i for i, n in enumerate(_counts(out)) if n > 1]) > 0:
        parents += 1
        longer = False
        for i in same:
            parts = _parts(files[i])
            first = len(parts) - len(files[i].name.split("/")) - parents
            longer |= first >= 0
            out[i] = replace(files[i], name="/".join(parts[max(0, first) :]))
        if not longer:
            return _number(out)
    return out


def _parts(file: FileRef) -> Sequence[str]:
    if not file.remote:
        return Path(os.path.abspath(file.path)).parts
    # What follows a # only tells apart addresses that differ in what must not be shown.
    return file.path.partition("://")[2].partition("#")[0].split("/")


def _number(files: list[FileRef]) -> list[FileRef]:
    """Addresses may differ in their queries only: the second of one name gets a number."""
    taken = {file.name for file in files}
    seen: set[str] = set()
    out = []
    for file in files:
        name, number = file.name, 1
        while name in seen or (number > 1 and name in taken):
            number += 1
            name = f"{file.name}~{number}"
        seen.add(name)
        out.append(replace(file, name=name))
    return out


def _counts(files: list[FileRef]) -> list[int]:
    """For each file, how many have its name."""
    counts = Counter(file.name for file in files)
    return [counts[file.name] for file in files]


def _fixed_part(pattern: Path) -> Path:
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()


def _file(path: Path, name: str, format: Format | None) -> FileRef | None:
    """A file, or None where neither its name nor the user says what it is."""
    kind = known_format(name, format)
    return FileRef(str(path), name.replace(os.sep, "/"), size_of(path), *kind) if kind else None


def known_format(name: str, format: Format | None) -> tuple[Format, Codec] | None:
    """Format and compression, by what the user says and what the name says."""
    by_name = classify(name)
    if by_name is None:
        return (format, CODECS.get(os.path.splitext(name.lower())[1], "")) if format else None
    return format or by_name[0], by_name[1]


# Globs of what is not on disk


def matcher(pattern: str) -> Callable[[str], bool]:
    """A glob as `glob.glob(…, recursive=True)` understands it, for paths that are only names.

    Stars match no hidden names, and no slashes but for `**`. Time is bounded by the lengths of pattern
    and path, whatever the pattern: it may come from a dataset's card.
    """
    parts = pattern.split("/")
    end = len(parts)
    globs = [
        re.compile(fnmatch.translate(part)).match if glob.has_magic(part) else None
        for part in parts
    ]

    def fits(at: int, name: str) -> bool:
        match = globs[at]
        if match is None:
            return parts[at] == name
        return (not name.startswith(".") or parts[at].startswith(".")) and match(name) is not None

    def spread(positions: set[int]) -> set[int]:
        """Where one may stand without going on: `**` also stands for no folder at all."""
        out: set[int] = set()
        for at in positions:
            out.add(at)
            while at < end - 1 and parts[at] == "**":
                at += 1
                out.add(at)
        return out

    def matches(path: str) -> bool:
        here = spread({0})
        for name in path.split("/"):
            after: set[int] = set()
            for at in here:
                if at == end:
                    continue
                if parts[at] != "**":
                    if fits(at, name):
                        after.add(at + 1)
                elif not name.startswith("."):
                    after |= {at, end} if at == end - 1 else {at}
            here = spread(after)
        return end in here

    return matches


def fixed_folder(pattern: str) -> str:
    """The folders of a pattern up to the first that is none for sure, without a slash at the end."""
    folder = _fixed_part(Path(pattern))
    return "" if folder == Path() else folder.as_posix()


def is_marker(name: str) -> bool:
    """Whether a path below a folder is one that its listing leaves out."""
    return any(part.startswith((".", "_")) for part in name.split("/"))


class Tree(Protocol):
    """Something with files in folders."""

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        """The files of a folder; none where there is no such folder."""

    def one(self, path: str) -> Entry | None:
        """A single file, if it is there."""


def find(tree: Tree, pattern: str) -> tuple[list[Entry], str]:
    """The files that a path or glob names, and the folder below which they are named.

    Only what may hold them is asked for.
    """
    if glob.has_magic(pattern):
        base = fixed_folder(pattern)
        rest = pattern[len(base) :].removeprefix("/")
        entries = tree.below(base, "/" in rest or "**" in rest)
        exactly = [entry for entry in entries if entry.path == pattern]
        if exactly:
            return exactly, pattern.rpartition("/")[0]
        matches = matcher(rest)
        return [entry for entry in entries if matches(below(entry.path, base))], base
    # What its ending says is a file is looked for as one first, and the rest as a folder.
    parent = pattern.rpartition("/")[0]
    named = classify(pattern) is not None
    if named and (file := tree.one(pattern)) is not None:
        return [file], parent
    inside = [e for e in tree.below(pattern, True) if not is_marker(below(e.path, pattern))]
    if inside:
        return inside, pattern
    file = tree.one(pattern) if not named and pattern else None
    return ([file], parent) if file is not None else ([], pattern)


def below(path: str, folder: str) -> str:
    """A path as it is named below a folder."""
    return path[len(folder) + 1 :] if folder else path


def _bundle(files: list[FileRef]) -> Iterable[FileRef]:
    """Put neighbouring plain-text files together until they make a chunk. Their ETags stand in its own, in order."""
    members: list[Member] = []
    etags: list[str] = []
    total = 0

    def close() -> Iterable[FileRef]:
        nonlocal members, etags, total
        if members:
            etag = ",".join(etags) if any(etags) else ""
            yield FileRef(
                members[0].path, members[0].name, total, "text", members=tuple(members), etag=etag
            )
        members, etags, total = [], [], 0

    for file in files:
        if file.format != "text" or file.codec:
            yield from close()
            yield file
            continue
        members.append(Member(file.path, file.name, file.size))
        # One with a comma cannot stand in a list of them; it is learnt when the file is read.
        etags.append("" if "," in file.etag else file.etag)
        total += file.size
        if total >= BUNDLE_BYTES or len(members) >= BUNDLE_FILES:
            yield from close()
    yield from close()


def each(files: Sequence[FileRef]) -> Iterable[FileRef]:
    """Every single file, those in bundles too."""
    for file in files:
        if not file.members:
            yield file
            continue
        etags = file.etag.split(",") if file.etag else [""] * len(file.members)
        for member, etag in zip(file.members, etags, strict=True):
            yield FileRef(member.path, member.name, member.size, file.format, file.codec, etag=etag)


def fingerprint(files: Sequence[FileRef]) -> str:
    """A digest of names, sizes and formats, in order, and of what servers say of their content: ETags, or dates.

    Times of files on disk are left out: a copy is the same data.
    """
    digest = hashlib.sha256()
    for file in each(files):
        line = f"{file.name}\0{file.size}\0{file.format}\0{file.codec}"
        line += f"\0{file.etag}\n" if file.etag else "\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


# What changed since


def remember(kept: Kept, files: Sequence[FileRef]) -> None:
    """Keep a listing by its fingerprint, for `explain_change`."""
    key = fingerprint(files)
    if kept.get("manifests", key) is None:
        rows = [[file.name, file.size, file.etag] for file in each(files)]
        kept.put("manifests", key, json.dumps(rows).encode())


def explain_change(kept: Kept, old_fingerprint: str, files: Sequence[FileRef]) -> str | None:
    """The first file that differs from a listing of before; None if that is not at hand, or nothing does."""
    data = kept.get("manifests", old_fingerprint)
    if data is None:
        return None
    before = {name: (size, etag) for name, size, etag in json.loads(data)}
    now = {file.name: (file.size, file.etag) for file in each(files)}
    for name, (size, etag) in now.items():
        if name not in before:
            return f"{name} was added"
        old_size, old_etag = before[name]
        if etag != old_etag:
            return f"{name} changed: {version_change(old_etag, etag)}"
        if size != old_size:
            return f"{name} changed: it was {old_size} bytes long, it is {size}"
    gone = next((name for name in before if name not in now), None)
    if gone is not None:
        return f"{gone} is gone"
    return "the files come in another order" if list(before) != list(now) else None
