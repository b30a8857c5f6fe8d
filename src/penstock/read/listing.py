"""List files that are elsewhere: on the Hub, in buckets, behind http(s) addresses.

In:    addresses, as users give them.
Out:   `FileRef`s with sizes and ETags, in the order and with the names that a local copy would have; beside
       them the full addresses of those files whose queries or logins are secrets.
Where: the thread that creates a dataset; what can be asked for side by side is.
State: listings on disk (`Kept`). What belongs to a commit never changes, and is asked for once; the rest
       is asked for anew, once for all processes that ask at the same time.

Nothing kept stands in for an answer that a server did not give: ranks would read different data. Only
where the network is not to be used (HF_HUB_OFFLINE=1), what was last heard holds.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from penstock.config import hub_endpoint
from penstock.config import offline as offline_here
from penstock.errors import AccessDenied, ConfigError, NoData, Offline, PenstockError, RemoteError
from penstock.read import card
from penstock.read.attempt import Patience
from penstock.read.http import Refused, Target, version_in
from penstock.read.hub import SHORT_NAMES, Entry, Hub, HubName, Known, Repository, parse
from penstock.read.kept import Kept
from penstock.read.manifest import (
    Tree,
    below,
    find,
    known_format,
    no_known_ending,
    remember,
    unknown_format,
)
from penstock.read.retry import Client, raise_for
from penstock.types import FileRef, Format

if TYPE_CHECKING:
    from penstock.read.buckets import Buckets

BUCKETS = ("s3", "s3a", "gs", "az", "abfs", "abfss")
KNOWN = "hf:// s3:// gs:// az:// abfss:// https:// http:// file://"


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that must not be seen: it shows as stars wherever it is printed."""

    _text: str

    def reveal(self) -> str:
        """The text itself: for a request, and for nothing else."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__


def basic_authorization(url: str) -> tuple[str, dict[str, str]]:
    """An address without its login, and the login as a header."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    name, _, password = user.partition(":")
    login = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode("ascii")
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {login}"}


class RemoteListing:
    """Lists what is elsewhere, for one dataset."""

    def __init__(
        self, client: Client, kept: Kept, *, config: str | None = None, offline: bool | None = None
    ) -> None:
        if not isinstance(config, str | None) or config == "":
            raise ConfigError(
                f"config={config!r}: needs the name of a configuration in the dataset's card"
            )
        self.kept = kept
        self.config = config
        self.secrets: dict[str, Secret] = {}
        """Full addresses of files whose `path` leaves something out, by that path."""
        self._client = client
        self._offline = offline_here() if offline is None else offline
        self._wait_s = client.limits.metadata_budget
        self._commits: dict[tuple[str, str], str] = {}
        self._shown: dict[str, str] = {}

    def takes(self, source: str) -> bool:
        """Whether a source is elsewhere."""
        if source in SHORT_NAMES:
            return not os.path.lexists(source)
        return "://" in source and not source.startswith("file://")

    def files_of(
        self, sources: Sequence[str], format: Format | None = None
    ) -> dict[str, list[FileRef]]:
        """The files of each source. All are looked at before anything is asked for."""
        hub: dict[str, HubName] = {}
        buckets: dict[str, tuple[str, str]] = {}
        web: dict[str, str] = {}
        for source in dict.fromkeys(sources):
            url = SHORT_NAMES.get(source, source)
            scheme = url.partition("://")[0].lower()
            if scheme == "hf":
                hub[source] = parse(url)
            elif scheme in BUCKETS:
                from penstock.read.buckets import place

                buckets[source] = place(url)
            elif scheme in ("http", "https"):
                web[source] = self._checked(url, format)
            else:
                raise ConfigError(
                    f"{scheme[:20]}://…: cannot be read. What can: a path on disk, {KNOWN}"
                )
        if self.config is not None and not any(name.path == "" for name in hub.values()):
            raise ConfigError(
                f"config={self.config!r}: names a configuration in a dataset's card, so it goes with "
                "hf://datasets/ORG/NAME without a path"
            )
        found: dict[str, list[FileRef]] = {}
        later: list[Callable[[], None]] = []
        commits = {(name.repo, name.revision): name for name in hub.values()}
        self._side_by_side([partial(self._resolve, name) for name in commits.values()])
        trees = {
            source: Repository(self._client, self.known, name.repo, self._commits[name[:2]])
            for source, name in hub.items()
        }
        thunks: list[Callable[[], None]] = []
        service: Buckets | None = None
        for source, name in hub.items():
            tree = trees[source]
            if name.path:
                thunks.append(partial(self._find, found, source, tree, name.path, format))
                continue
            thunks.append(tree.read_card)
            if self.config is None:
                thunks.append(
                    tree.read_all
                )  # most often the default is all or most of a repository
            later.append(partial(self._configured, found, source, tree, format))
        for source, (root, key) in buckets.items():
            service = service or self._buckets()
            thunks.append(
                partial(self._find, found, source, _Bucket(self.known, service, root), key, format)
            )
        for source, path in web.items():
            thunks.append(partial(self._look_up, found, source, path, format))
        self._side_by_side(thunks)
        for thunk in later:
            thunk()
        return found

    def know(self, files: Sequence[FileRef], urls: Any) -> None:
        """Take a listing that another process made of the same sources. Secrets did not travel with it."""
        for url in [urls] if isinstance(urls, str | os.PathLike) else urls:
            if isinstance(url, str) and url.lower().startswith(("http://", "https://")):
                self._public(url)
        remember(self.kept, files)

    def _side_by_side(self, thunks: Sequence[Callable[[], None]]) -> None:
        if thunks:
            self._client.side_by_side(thunks)

    # The Hub

    def _resolve(self, name: HubName) -> None:
        """The commit of a revision. A branch may have moved, so it is asked for unless that is forbidden."""
        if name.pinned:
            self._commits[name[:2]] = name.revision
            return
        what = f"which commit {name.revision!r} of {name.repo} is"
        make = partial(Hub(self._client).commit, name)
        key = [hub_endpoint(), name.repo, name.revision]
        self._commits[name[:2]] = self.known("revisions", key, make, what, moving=True)

    def _find(
        self, found: dict[str, Any], source: str, tree: _Files, pattern: str, format: Format | None
    ) -> None:
        entries, base = find(tree, pattern)
        if not entries:
            where = f"{tree.prefix}{pattern}"
            if has_magic(pattern):
                raise NoData(
                    f"{where} matches no file. `*` matches within a folder, `**` at any depth."
                )
            raise NoData(f"{where} does not exist.")
        found[source] = _refs(tree, entries, base, format, pattern)

    def _configured(
        self, found: dict[str, Any], source: str, tree: Repository, format: Format | None
    ) -> None:
        """The files that the card gives the configuration, or those that look like data."""
        where = f"{tree.prefix}README.md"
        choice = card.choose(card.configurations(tree.card, where), self.config, where)
        if choice.patterns is None:
            entries = card.data_files(
                tree.below(choice.folder, True), f"{tree.prefix}{choice.folder}", format
            )
            found[source] = _refs(tree, entries, "", format, "")
            return
        found_by: list[list[Entry]] = [[] for _ in choice.patterns]

        def match(i: int, pattern: str) -> None:
            entries = find(tree, pattern)[0]
            if has_magic(pattern):
                entries = [entry for entry in entries if not card.about_data(entry.path)]
            if not entries:
                raise NoData(
                    f"{tree.prefix}{pattern}, which the dataset's card names, matches no file."
                )
            found_by[i] = sorted(entries)

        self._side_by_side(
            [partial(match, i, pattern) for i, pattern in enumerate(choice.patterns)]
        )
        each = {entry.path: entry for entries in found_by for entry in entries}
        found[source] = _refs(tree, list(each.values()), "", format, "", sort=False)

    # Buckets

    def _buckets(self) -> Buckets:
        from penstock.read.buckets import Buckets

        return Buckets(self._client)

    # http(s)

    def _checked(self, url: str, format: Format | None) -> str:
        """What may be shown of an address that can be read, or an error that shows no more than that."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or re.search(r"[\s\0\\]", url):
            raise ConfigError(
                "an http(s) address is malformed; needs the form https://host/path/file.parquet"
            )
        path = self._public(url)
        if "*" in parts.path or parts.path.endswith("/") or not parts.path:
            raise ConfigError(
                f"{path}: there is no listing over http(s). Give the address of each file, as a list."
            )
        if path.startswith(f"{hub_endpoint()}/datasets/") and "/resolve/" not in path:
            raise ConfigError(
                f"{path}: is a page of the Hub. Give its dataset as hf://datasets/ORG/NAME/path-or-glob"
            )
        if known_format(parts.path, format) is None:
            raise unknown_format(path)
        return path

    def _public(self, url: str) -> str:
        """What may be shown of an address; the whole of it goes to the secrets where that is less."""
        parts = urlsplit(url)
        path = shown = f"{parts.scheme.lower()}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        whole, number = url.partition("#")[0], 1
        while self._shown.setdefault(shown, whole) != whole:
            number += 1
            shown = f"{path}#{number}"  # nothing of what tells them apart may be shown
        if shown != whole:
            self.secrets[shown] = Secret(whole)
        return shown

    def _look_up(
        self, found: dict[str, Any], source: str, path: str, format: Format | None
    ) -> None:
        """Size and ETag of a file, by one request."""
        whole = self.secrets[path].reveal() if path in self.secrets else path
        url, login = basic_authorization(whole)
        what = f"the size of {path}"
        # By all of the address: another query may be another file. What is secret of it is kept as a digest only.
        size, etag = self.known(
            "files", [path, whole], partial(self._ask, url, login, path), what, moving=True
        )
        kind = known_format(urlsplit(path).path, format)
        assert kind is not None
        name = urlsplit(path).path.rpartition("/")[2]
        plain = unquote(name)
        name = plain if plain.isprintable() and "/" not in plain else name
        found[source] = [FileRef(path, name, size, *kind, etag=etag)]

    def _ask(self, url: str, login: dict[str, str], path: str) -> tuple[int, str]:
        try:
            reply = self._client.call(
                url, what=path, method="HEAD", headers=login, ok=(200, 403, 405, 501)
            )
            length = reply.headers.get("content-length", "")
            if reply.status == 200 and length.isdigit() and "content-encoding" not in reply.headers:
                return int(length), version_in(reply.headers)
            # Addresses signed for GET refuse HEAD, some servers do not know it or say too little.
            return self._ask_by_range(url, login, path)
        except Refused as refusal:
            raise _no(path, refusal.status) from None

    def _ask_by_range(self, url: str, login: dict[str, str], path: str) -> tuple[int, str]:
        headers = {**login, "Range": "bytes=0-0"}

        def attempt(patience: Patience) -> tuple[int, str]:
            # The body is left alone: a server that does not know ranges would send the whole file.
            with self._client.follow("GET", Target(url), headers, None, patience)[1] as response:
                total = response.headers.get("content-range", "").rpartition("/")[2]
                if response.status == 206 and total.isdigit():
                    return int(total), version_in(response.headers)
                if response.status == 416 and total == "0":
                    return 0, version_in(response.headers)
                if response.status in (200, 206):
                    raise RemoteError(
                        f"{path}: its server does not answer requests for a range of bytes, or does not say how long "
                        "the file is. Use one that does, or copy the file to disk."
                    )
                raise_for(response)

        return self._client.keep_trying(path, self._wait_s, attempt)

    # On disk

    def known(
        self, kind: str, key: Sequence[Any], make: Callable[[], Any], what: str, *, moving: bool
    ) -> Any:
        """What is kept, or else asked for; what moves is asked for anew, unless the network is not to be used."""
        name = json.dumps(key)
        if not self._offline:
            since = time.time() if moving else None
            return json.loads(
                self.kept.once(
                    kind, name, lambda: json.dumps(make()).encode(), self._wait_s, since=since
                )
            )
        data = self.kept.get(kind, name)
        if data is None:
            raise Offline(
                f"{what} is not known on this machine, and HF_HUB_OFFLINE is set. Run once with the network "
                f"(HF_HUB_OFFLINE=0) and the same cache ({self.kept.folder}); it is kept there."
            )
        return json.loads(data)


class _Files(Tree, Protocol):
    """A tree, and what stands before its paths in an address."""

    prefix: str


class _Bucket:
    """A bucket. What is in it may change."""

    def __init__(self, known: Known, service: Buckets, root: str) -> None:
        self._known, self._service, self._root = known, service, root
        self.prefix = f"{root}/"

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        make = partial(self._service.below, self._root, folder, recursive=recursive)
        return self._entries([folder, recursive], make, f"which files {self.prefix}{folder} has")

    def one(self, path: str) -> Entry | None:
        def make() -> list[Entry]:
            entry = self._service.one(self._root, path)
            return [] if entry is None else [entry]

        return next(iter(self._entries([path], make, f"the size of {self.prefix}{path}")), None)

    def _entries(self, key: list[Any], make: Callable[[], list[Entry]], what: str) -> list[Entry]:
        key = [self._service.endpoint(self._root), self._root, *key]
        return [Entry(*row) for row in self._known("listings", key, make, what, moving=True)]


def _refs(
    tree: _Files,
    entries: list[Entry],
    base: str,
    format: Format | None,
    pattern: str,
    *,
    sort: bool = True,
) -> list[FileRef]:
    """Files by their names below a folder, leaving out those that are no text."""
    found = []
    for name, entry in (sorted if sort else list)(
        (below(entry.path, base), entry) for entry in entries
    ):
        kind = known_format(name, format)
        if kind is not None:
            found.append(
                FileRef(f"{tree.prefix}{entry.path}", name, entry.size, *kind, etag=entry.etag)
            )
    if not found:
        where = f"{tree.prefix}{pattern}"
        raise (
            unknown_format(where)
            if [e.path for e in entries] == [pattern]
            else no_known_ending(where, len(entries))
        )
    return found


def _no(path: str, status: int) -> PenstockError:
    if status in (404, 410):
        return NoData(f"{path} does not exist: its server answers {status}.")
    if status in (401, 403, 407, 451):
        return AccessDenied(
            f"{path}: its server refuses access ({status}). A signed address may have expired, or a login is missing: "
            "make a new address, or give the login as https://user:password@host/…"
        )
    return RemoteError(f"{path}: its server answers {status}.")


__all__ = ["RemoteListing", "Secret", "basic_authorization"]
