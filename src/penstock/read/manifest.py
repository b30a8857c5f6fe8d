"""List the files that a dataset consists of.

In:    a path, a folder, a glob, or a list of these.
Out:   `FileRef`s in a fixed order, and a fingerprint of names and sizes.
Where: the thread that creates the dataset.
State: none. No file is opened.
Cost:  one `stat` a file.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.errors import ConfigError, NoData
from penstock.types import Codec, FileRef, Format, Member, MiB

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
) -> tuple[FileRef, ...]:
    """The files behind `urls`, each once, in the order given and by name within a folder or glob.

    With `whole`, a plain-text file is one document, and small ones are bundled.
    """
    try:
        sources = [urls] if isinstance(urls, str | os.PathLike) else [os.fspath(url) for url in urls]
    except TypeError:
        raise ConfigError(f"{urls!r} is no path, folder, glob or list of these") from None
    if not sources:
        raise NoData("no data: the list of paths is empty. Name a file, a folder or a glob.")
    found: dict[str, FileRef] = {}
    for source in sources:
        for file in _expand(os.fspath(source), format):
            found.setdefault(os.path.realpath(file.path), file)
    files = tell_apart(list(found.values()))
    return tuple(_bundle(files) if whole else files)


def _expand(source: str, format: Format | None) -> Iterable[FileRef]:
    if "://" in source:
        if not source.startswith("file://"):
            scheme = source.partition("://")[0]
            raise ConfigError(f"{source}: cannot read {scheme}:// yet. Give a path on disk or file://…")
        source = source.removeprefix("file://")
    path = Path(source).expanduser()
    if path.is_file():
        known = _file(path, path.name, format)
        if known is None:
            raise ConfigError(
                f"{path}: cannot tell its format from its name. Name it: TextDataset(…, format='parquet')"
            )
        yield known
        return
    if path.is_dir():
        root, names = path, sorted(_walk(path))
    else:
        root = _fixed_part(path)
        matches = glob.glob(str(path), recursive=True)
        names = sorted(os.path.relpath(m, root) for m in matches if os.path.isfile(m))
        if not names:
            what = "matches no file" if glob.has_magic(str(path)) else "does not exist"
            raise NoData(f"{path} {what} (looked from {Path.cwd()})")
    files = [f for name in names if (f := _file(root / name, name, format)) is not None]
    if not files:
        endings = " ".join(FORMATS)
        raise NoData(
            f"{path}: none of its {len(names)} files has an ending we know ({endings}, "
            f"each also {' '.join(CODECS)}). Name the format: TextDataset(…, format='jsonl')"
        )
    yield from files


def tell_apart(files: list[FileRef]) -> list[FileRef]:
    """Files of one name, from different folders, are named by as much of their path as it takes."""
    out = list(files)
    parents = 0
    while len(same := [i for i, n in enumerate(_counts(out)) if n > 1]) > 0:
        parents += 1
        for i in same:
            parts = Path(os.path.abspath(files[i].path)).parts
            below = len(files[i].name.split("/"))
            out[i] = replace(files[i], name="/".join(parts[max(0, len(parts) - below - parents) :]))
    return out


def _counts(files: list[FileRef]) -> list[int]:
    """For each file, how many have its name."""
    counts = Counter(file.name for file in files)
    return [counts[file.name] for file in files]


def _walk(root: Path) -> Iterable[str]:
    for folder, folders, names in os.walk(root):
        # Hidden and underscored files are markers of other tools (.git, _SUCCESS, ._part-0).
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            if not name.startswith((".", "_")):
                yield os.path.relpath(os.path.join(folder, name), root)


def _fixed_part(pattern: Path) -> Path:
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts) if parts else Path()


def _file(path: Path, name: str, format: Format | None) -> FileRef | None:
    """A file, or None where neither its name nor the user says what it is."""
    by_name = classify(name)
    if by_name is None:
        if format is None:
            return None
        by_name = (format, CODECS.get(path.suffix.lower(), ""))
    return FileRef(str(path), name.replace(os.sep, "/"), path.stat().st_size, format or by_name[0], by_name[1])


def _bundle(files: list[FileRef]) -> Iterable[FileRef]:
    """Put neighbouring plain-text files together until they make a chunk."""
    members: list[Member] = []
    total = 0

    def close() -> Iterable[FileRef]:
        nonlocal members, total
        if members:
            yield FileRef(members[0].path, members[0].name, total, "text", members=tuple(members))
        members, total = [], 0

    for file in files:
        if file.format != "text" or file.codec:
            yield from close()
            yield file
            continue
        members.append(Member(file.path, file.name, file.size))
        total += file.size
        if total >= BUNDLE_BYTES or len(members) >= BUNDLE_FILES:
            yield from close()
    yield from close()


def fingerprint(files: Sequence[FileRef]) -> str:
    """A digest of names, sizes and formats, in order. Times are left out: a copy is the same data."""
    digest = hashlib.sha256()
    for file in files:
        for member in file.members or (Member(file.path, file.name, file.size),):
            line = f"{member.name}\0{member.size}\0{file.format}\0{file.codec}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
