"""List the files of a dataset: on disk, on the Hub, in buckets and on web servers.

Files keep the order of the given addresses and are sorted by name within a folder or glob. Remote
files are named as a local copy would be. Opens no file. A listing of a Hub commit never changes, so
it is requested once; every run requests the others again. Offline (HF_HUB_OFFLINE=1), the last known
listing is used.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias
from urllib.parse import unquote, urlsplit

from penstock.config import write_atomically
from penstock.errors import ConfigError, RemoteError, SourceError
from penstock.types import Codec, FileRef, Format, Member, MiB

if TYPE_CHECKING:
    from penstock.read.buckets import Bucket
    from penstock.read.http import Network
    from penstock.read.hub import Repository

    Tree: TypeAlias = Repository | Bucket

log = logging.getLogger("penstock")

ENDINGS: dict[Format, str] = {
    "parquet": ".parquet .pq",
    "jsonl": ".jsonl .ndjson .json",
    "text": ".txt .text .md .rst .py",
}
FORMATS = {ending: format for format, endings in ENDINGS.items() for ending in endings.split()}
CODECS: dict[str, Codec] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz"}
BUCKETS = ("s3", "s3a", "gs", "az", "abfs", "abfss")
FORMAT_HINT = "Name the format: TextDataset(…, format='jsonl')"
SHORT_NAMES = {"fineweb_edu": "hf://datasets/HuggingFaceFW/fineweb-edu"}
"""Short names of datasets."""
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_PAGE = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/datasets/(?P<repo>[^/?#]+(?:/[^/?#]+)??)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/(?P<path>[^?#]*))?)?/?(?:[?#]|$)"
)
WILDCARDS = {"**/": "(?:.+/)?", "**": ".+", "*": "[^/]*", "?": "[^/]"}
SCHEMES = "hf:// s3:// gs:// az:// abfss:// https:// http:// file://"
BUNDLE_BYTES = 4 * MiB
BUNDLE_FILES = 1024
"""Small text files are read this many at a time: a task per file would cost more than its text."""


class Entry(NamedTuple):
    """A file in a listing."""

    name: str
    """Its path below a repository, bucket or folder."""
    size: int
    etag: str = ""
    used: float = 0.0
    """When a file on disk was last written or read."""


TRIM = 32
"""One in this many writes checks the size of the cache."""


def list_files(
    urls: Any, *, format: Format | None = None, whole: bool = True,
    remote: RemoteListing | None = None,
) -> tuple[FileRef, ...]:  # fmt: skip
    """Return the files behind `urls`, each once.

    whole: a plain-text file is one document, and small ones are bundled.
    remote: lists remote files; None if all files are on disk.
    """
    paths = source_paths(urls)
    # All remote sources at once, so that they are listed in parallel.
    away = {} if remote is None else remote.files_of([p for p in paths if is_remote(p)], format)
    found = [file for p in paths for file in (away[p] if p in away else _local(p, format))]
    files = distinct(found)
    return tuple(_bundle(files) if whole else files)


def is_remote(source: str) -> bool:
    """Return True if a source is not on disk."""
    address = full_address(source)
    return "://" in address and not address.startswith("file://")


def full_address(source: str) -> str:
    """Return hf://datasets/… for a short name, ORG/NAME or a page of the Hub; else the source."""
    if page := _HUB_PAGE.match(source):
        revision = f"@{page['revision']}" if page["revision"] else ""
        return f"hf://datasets/{page['repo']}{revision}/{unquote(page['path'] or '')}"
    if source in SHORT_NAMES and not os.path.lexists(source):
        return SHORT_NAMES[source]
    repo = _REPOSITORY.fullmatch(source) and classify(source) is None
    is_hub = repo and not os.path.lexists(source.split("/")[0])
    return f"hf://datasets/{source}" if is_hub else source


def source_paths(urls: Any) -> list[str]:
    """Return the sources that a user gave as a list of texts."""
    several = isinstance(urls, Iterable) and not isinstance(urls, str)
    given = urls if several else [urls]
    paths = [os.fspath(url) if isinstance(url, os.PathLike) else url for url in given]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        # Not shown, because addresses may contain logins.
        raise ConfigError("urls must be a path, a folder, a glob, an address or a list of these")
    return paths


# Formats


def classify(name: str, format: Format | None = None) -> tuple[Format, Codec] | None:
    """Return format and compression by a file's endings, or None if they are unknown."""
    stem, ending = os.path.splitext(name.lower())
    codec = CODECS.get(ending, "")
    kind = format or FORMATS.get(os.path.splitext(stem)[1] if codec else ending)
    if kind is None or (kind == "parquet" and codec):  # compressed Parquet has no random access
        return None
    return kind, codec


def _no_format(where: str) -> ConfigError:
    endings = f"{' '.join(FORMATS)}, all but Parquet also {' '.join(CODECS)}"
    return ConfigError(f"{where}: no name tells a format ({endings}). {FORMAT_HINT}")


# On disk


def _local(source: str, format: Format | None) -> list[FileRef]:
    if is_remote(source):
        raise ConfigError(f"{source}: only files on disk can be read here")
    path = Path(source.removeprefix("file://")).expanduser()
    if path.is_dir():
        root, found = path, list(_files_below(path))
    else:
        root = path.parent if path.is_file() else Path(fixed_folder(str(path)))
        every = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
        found = [name for name in every if os.path.isfile(name)]
        if not found:
            what = "matches no file" if glob.has_magic(str(path)) else "does not exist"
            raise SourceError(f"{path} {what} (looked from {Path.cwd()})")
    try:
        entries = [Entry(os.path.relpath(name, root), os.path.getsize(name)) for name in found]
    except FileNotFoundError as error:
        raise SourceError(f"{error.filename} is a link to nothing. Remove it.") from error
    return _refs(f"{root}{os.sep}", sorted(entries), "", format, str(path))


def _files_below(root: Path) -> Iterator[str]:
    """Return the paths of all files below a folder. Follows links, and visits each folder once."""
    seen = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, onerror=_unlistable, followlinks=True):
        inside = {os.path.realpath(os.path.join(folder, name)): name for name in sorted(folders)}
        folders[:] = [n for real, n in inside.items() if real not in seen and not is_marker(n)]
        seen.update(inside)
        yield from (os.path.join(folder, name) for name in names if not is_marker(name))


def _unlistable(error: OSError) -> NoReturn:
    # Ignoring it would train on a part of the data without notice.
    raise SourceError(f"{error.filename}: its files cannot be listed: {error.strerror}.") from error


# Names


def is_marker(path: str) -> bool:
    """Return True for names that begin with a dot or underscore, such as .git and _SUCCESS."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


def distinct(files: Iterable[FileRef]) -> list[FileRef]:
    """Return each file once. Files that share a name get a number, in their order."""
    found: dict[str, FileRef] = {}
    seen: Counter[str] = Counter()
    for file in files:
        where = file.path if file.remote else os.path.realpath(file.path)
        if where not in found:
            seen[file.name] += 1
            number = f"~{seen[file.name]}" if seen[file.name] > 1 else ""
            found[where] = replace(file, name=file.name + number)
    return list(found.values())


def fixed_folder(pattern: str) -> str:
    """Return the folders of a pattern up to the first that has a wildcard."""
    parts = Path(pattern).parts[:-1]
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return str(Path(*parts[:first])) if first else ""


def matcher(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for whole paths: `*` matches within a folder, `**` at any depth."""
    text = ""
    for part in re.split(r"(\*\*/?|\*|\?|\[[^]]+\])", pattern):
        sets = part.replace("[!", "[^") if part.startswith("[") else re.escape(part)
        text += WILDCARDS.get(part, sets)
    return re.compile(text)


# Bundles and fingerprints


def _bundle(files: list[FileRef]) -> Iterable[FileRef]:
    """Join neighbouring plain-text files until they make a chunk."""
    part: list[FileRef] = []
    for file in [*files, None]:
        plain = file is not None and file.format == "text" and not file.codec
        size = sum(each.size for each in part)
        if part and (not plain or size >= BUNDLE_BYTES or len(part) >= BUNDLE_FILES):
            members = tuple(Member(each.path, each.name, each.size, each.etag) for each in part)
            yield replace(part[0], size=size, members=members, etag="")
            part = []
        if file is not None and plain:
            part.append(file)
        elif file is not None:
            yield file


def members_of(file: FileRef) -> list[FileRef]:
    """Return the files of a bundle, or the file itself."""
    return [FileRef(*m[:3], file.format, etag=m.etag) for m in file.members] or [file]


def each(files: Sequence[FileRef]) -> Iterable[FileRef]:
    """Return every single file, also those in bundles."""
    return (member for file in files for member in members_of(file))


def fingerprint(files: Sequence[FileRef]) -> str:
    """Return a digest of names, sizes, formats and ETags, in order.

    Modification times are not included, so a copy is the same data.
    """
    digest = hashlib.sha256()
    for file in each(files):
        etag = f"\0{file.etag}" if file.etag else ""
        line = f"{file.name}\0{file.size}\0{file.format}\0{file.codec}{etag}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


# Remote files


@dataclass(frozen=True, slots=True)
class Secret:
    """A string that is never printed."""

    text: str = field(repr=False)


def find(tree: Tree, pattern: str) -> tuple[list[Entry], str]:
    """Return the files that a path or glob names, and the folder that their names are relative to."""
    if glob.has_magic(pattern):
        base = fixed_folder(pattern)
        rest = _below(pattern, base)
        matches = matcher(rest).fullmatch
        entries = tree.below(base, "/" in rest or "**" in rest)
        return [entry for entry in entries if matches(_below(entry.name, base))], base
    # Try a path with a known extension as a file first, and any other as a folder.
    named = classify(pattern) is not None
    file = tree.one(pattern) if named else None
    entries = [] if file else tree.below(pattern, True)
    inside = [e for e in entries if not is_marker(_below(e.name, pattern))]
    if pattern and not named and not inside:
        file = tree.one(pattern)
    return ([file], pattern.rpartition("/")[0]) if file else (inside, pattern)


def _below(path: str, folder: str) -> str:
    return path[len(folder) + 1 :] if folder else path


class RemoteListing:
    """Lists the remote files of one dataset."""

    def __init__(
        self, network: Network, cache: MetadataCache, *, config: str | None, offline: bool
    ) -> None:
        self.cache = cache
        self.secrets: dict[str, Secret] = {}
        """Full addresses of files whose `path` omits a login or query, by that path."""
        self._config, self._network, self._offline = config, network, offline

    def files_of(self, sources: Sequence[str], format: Format | None) -> dict[str, list[FileRef]]:
        """Return the files of each source. Checks all addresses before the first request."""
        from penstock.read.hub import HubName, Repository, parse

        calls: dict[str, Callable[[], list[FileRef]]] = {}
        hub: dict[str, HubName] = {}
        for source in dict.fromkeys(sources):
            url = full_address(source)
            scheme = url.partition("://")[0].lower()
            if scheme == "hf":
                hub[source] = parse(url)
            elif scheme in BUCKETS:
                from penstock.read.buckets import Bucket, place

                root, key = place(url)
                bucket = Bucket(self._network, root, self.known)
                calls[source] = partial(self._find, bucket, key, format)
            elif scheme in ("http", "https"):
                calls[source] = partial(self._on_web, self._public(url, format), format)
            else:
                raise ConfigError(f"{scheme[:20]}://… cannot be read; use a path, {SCHEMES}")
        if self._config is not None and all(n.path or not n.revision for n in hub.values()):
            raise ConfigError(f"config={self._config!r}: goes with hf://datasets/ORG/NAME, no path")
        # All addresses of a branch use the same commit, even if the branch moves meanwhile.
        branches = list(dict.fromkeys(name._replace(path="") for name in hub.values()))
        opened = [partial(Repository, self._network, self.known, branch) for branch in branches]
        trees = dict(zip(branches, self._network.gather(opened), strict=True))
        for source, name in hub.items():
            tree = trees[name._replace(path="")]
            calls[source] = partial(self._in_repository, tree, name.path, format)
        return dict(zip(calls, self._network.gather(list(calls.values())), strict=True))

    def know(self, urls: Any) -> None:
        """Store the secrets of sources that rank 0 listed: they are not sent."""
        for url in map(full_address, source_paths(urls)):
            if url.lower().startswith(("http://", "https://")):
                self._public(url, "text")

    # The Hub and buckets

    def _in_repository(self, tree: Repository, path: str, format: Format | None) -> list[FileRef]:
        """Return the files of a path, or else of a configuration in the dataset's card."""
        from penstock.read import hub

        if path or tree.is_bucket:
            return self._find(tree, path, format)
        where = f"{tree.prefix}README.md"
        # The default is usually most of the repository, so list it while the card is fetched.
        listing: list[Callable[[], Any]] = [] if self._config else [tree.list_all]
        text = self._network.gather([tree.card, *listing])[0]
        folder, patterns = hub.choose(text, self._config, where)
        if patterns is None:
            entries = tree.below(folder, True)
            found = sorted(hub.data_files(entries, f"{tree.prefix}{folder}", format))
        else:
            found = []
            for pattern in patterns:
                entries = [e for e in find(tree, pattern)[0] if not hub.ABOUT.search(e.name)]
                if not entries:
                    raise SourceError(f"{tree.prefix}{pattern}, named by the card, has no file.")
                found += sorted(entries)
        return _refs(tree.prefix, list(dict.fromkeys(found)), "", format, tree.prefix)

    def _find(self, tree: Tree, pattern: str, format: Format | None) -> list[FileRef]:
        entries, base = find(tree, pattern)
        if not entries:
            magic = "matches no file. `*` matches within a folder, `**` at any depth."
            what = magic if glob.has_magic(pattern) else "does not exist."
            raise SourceError(f"{tree.prefix}{pattern} {what}")
        return _refs(tree.prefix, sorted(entries), base, format, f"{tree.prefix}{pattern}")

    # Web servers

    def _public(self, url: str, format: Format | None) -> str:
        """Return the part of an address that may be shown, and store the whole as a secret."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or re.search(r"[\s\0\\]", url):
            raise ConfigError("a malformed address; needs the form https://host/path/file.parquet")
        shown = f"{parts.scheme.lower()}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if "*" in parts.path or parts.path.endswith("/") or not parts.path:
            raise ConfigError(f"{shown}: web servers have no listing. Name each file.")
        if classify(parts.path, format) is None:
            raise _no_format(shown)
        whole = Secret(url.partition("#")[0])
        if self.secrets.setdefault(shown, whole) != whole:
            raise ConfigError(f"{shown}: given twice, with different logins or queries")
        return shown

    def _on_web(self, path: str, format: Format | None) -> list[FileRef]:
        whole = self.secrets[path].text
        # The key is kept as a digest only.
        make = partial(self._network.probe, whole, path)
        size, etag = self.known("files", [path, whole], make, moving=True)
        folder, _, name = path.rpartition("/")
        ref = _refs(f"{folder}/", [Entry(unquote(name), size, etag)], "", format, path)[0]
        return [replace(ref, path=path)]

    def known(self, kind: str, key: Sequence[Any], make: Callable[[], Any], *, moving: bool) -> Any:
        """Return what is kept, else ask. What may have changed is asked for again if possible.

        key: begins with what may be shown.
        """
        name = json.dumps(key)
        data = self.cache.get(kind, name) if self._offline or not moving else None
        if data is None and self._offline:
            missing = f"{key[0]} is not in the cache ({self.cache.folder}: no {kind})"
            advice = "Run once with the network (HF_HUB_OFFLINE=0) and the same cache."
            raise RemoteError(f"{missing}, and HF_HUB_OFFLINE is set. {advice}")
        if data is None:
            data = json.dumps(make()).encode()
            self.cache.put(kind, name, data)
        return json.loads(data)


def _refs(
    prefix: str, entries: list[Entry], base: str, format: Format | None, source: str
) -> list[FileRef]:
    """Return files by their names below a folder, without those that are not text."""
    found = []
    for path, size, etag, _ in entries:
        name = _below(path, base)
        if (kind := classify(name, format)) is not None:
            found.append(FileRef(f"{prefix}{path}", name, size, *kind, etag=etag))
    if not found:
        raise _no_format(source)
    return found


# What is kept for later runs


class MetadataCache:
    """Listings, cards and footers in one folder. Nothing is opened before the first use.

    Files are metadata/<kind>/<32 hex of the key>, each with a checksum, written under a temporary
    name and renamed. On a disk that cannot be written the work is done again, and the run continues.
    """

    def __init__(self, folder: Path, *, max_bytes: int = 512 * MiB) -> None:
        self.folder = Path(folder) / "metadata"
        self.max_bytes = max_bytes
        """Disk space. The oldest entries are dropped."""
        self._warned = False

    def get(self, kind: str, key: str) -> bytes | None:
        """Return what was put under a key, or None."""
        try:
            digest, _, data = self._path(kind, key).read_bytes().partition(b"\n")
        except OSError as error:
            self._warn_once(error)
            return None
        return data if digest == _digest(kind, key, data) else None

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Keep a value. A disk that does not take it costs one warning."""
        path = self._path(kind, key)
        try:
            write_atomically(path, [_digest(kind, key, data), b"\n", data])
            if int(path.name[-4:], 16) % TRIM == 0:
                self._trim()
        except OSError as error:
            self._warn_once(error)

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / _digest("", key, b"").decode()[:32]

    def _trim(self) -> None:
        """Drop the oldest files, also those half written, until a quarter of the space is free."""
        files = self.folder.glob("*/*")
        found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in files)
        total = sum(size for _, size, _ in found)
        for _, size, path in found if total > self.max_bytes else []:
            if total > self.max_bytes * 3 // 4:
                path.unlink(missing_ok=True)
                total -= size

    def _warn_once(self, error: OSError) -> None:
        # A file that is not there was never put, or another process dropped it.
        if not self._warned and not isinstance(error, FileNotFoundError):
            self._warned = True
            log.warning("%s cannot be used (%s); nothing is kept there.", self.folder, error)


def _digest(kind: str, key: str, data: bytes) -> bytes:
    """Return a digest of the content and of where it belongs."""
    where = f"{kind}\0{key}\0".encode("utf-8", "surrogatepass")
    return hashlib.sha256(where + data).hexdigest().encode()
