"""Names on the Hugging Face Hub: what an address means, which commit and which files are behind it.

In:    hf://datasets/ORG/NAME[@revision]/path-or-glob
Out:   a commit; the files of a folder with sizes and ETags; the dataset's card; addresses to read from.
Where: whichever thread lists files; fetch threads ask for addresses.
State: none.
Cost:  one request for a branch or tag, none for a commit; one for each page of a listing.

Why not `huggingface_hub`: it takes 0.2 s to import, asks for more than is needed, and gives up at the
first 503. Its conventions are kept: endpoint, token, offline mode, names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, unquote, urljoin

from penstock.config import hub_endpoint, hub_token
from penstock.errors import (
    AccessDenied,
    ConfigError,
    NoData,
    PenstockError,
    RemoteError,
    SourceError,
)
from penstock.read.http import Refused, Target
from penstock.read.retry import Client, Reply
from penstock.types import MiB

SCHEME = "hf://datasets/"
FORM = "hf://datasets/ORG/NAME[@revision]/path-or-glob"
SHORT_NAMES = {"fineweb_edu": "hf://datasets/HuggingFaceFW/fineweb-edu"}
"""What may stand for a whole address."""
MAX_CARD = MiB
MAX_FILES = 10_000_000
TRIES = 3
"""How often an answer that is no answer (a portal's web page) is asked for again."""

_SHA = re.compile(r"[0-9a-fA-F]{40}")
_WORD = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,95})")
_REFS = re.compile(r"refs/(?:convert/[A-Za-z0-9._-]+|pr/[0-9]+)(?=/|$)")

_UNSOUND = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]|(?:^|/)\.{0,2}(?:/|\Z)")
"""Control characters, backslashes, half characters; empty parts, `.` and `..`."""


class HubName(NamedTuple):
    """What an address names."""

    repo: str
    revision: str
    path: str
    """A file, a folder or a glob; empty for the whole repository."""

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which cannot change."""
        return _SHA.fullmatch(self.revision) is not None


class Entry(NamedTuple):
    """A file in a listing."""

    path: str
    size: int
    etag: str


def parse(url: str) -> HubName:
    """What an hf:// address names, or an error that shows how to write one."""
    rest = url.removeprefix("hf://")
    kind = rest.partition("/")[0]
    if kind in ("models", "spaces", "buckets", "kernels"):
        raise ConfigError(f"{url}: only datasets can be read from the Hub: {FORM}")
    if kind != "datasets":
        raise ConfigError(f"{url}: needs the form {FORM}")
    org, at, after = rest.removeprefix("datasets").removeprefix("/").partition("/")
    if "@" in org:
        # A dataset without an organisation; with one, the @ comes after the name.
        org, _, revision = org.partition("@")
        repo, rest = org, f"@{revision}{at}{after}"
    elif not after:
        repo, rest = org, ""
    else:
        name = re.match(r"[^/@]*", after)
        assert name is not None
        repo, rest = f"{org}/{name[0]}", after[name.end() :]
    if any(not _WORD.fullmatch(word) or ".." in word for word in repo.split("/")):
        raise ConfigError(f"{url}: {repo!r} is no name of a dataset; needs the form {FORM}")
    revision, path = _revision(url, rest)
    if path and not sound(path.removesuffix("/")):
        raise ConfigError(f"{url}: {path!r} is no path in a repository; needs the form {FORM}")
    return HubName(repo, revision, path.removesuffix("/"))


def _revision(url: str, rest: str) -> tuple[str, str]:
    """Revision and path, from what follows a repository's name."""
    if not rest.startswith("@"):
        return "main", rest.removeprefix("/")
    rest = rest[1:]
    refs = _REFS.match(rest)
    written, path = (refs[0], rest[refs.end() + 1 :]) if refs else rest.partition("/")[::2]
    revision = unquote(written)
    if not sound(revision) or any(c.isspace() for c in revision):
        raise ConfigError(
            f"{url}: {written!r} is no revision; needs a branch, a tag or a commit: {FORM}"
        )
    return (revision.lower() if _SHA.fullmatch(revision) else revision), path


def sound(path: str) -> bool:
    """Whether a path stays below where it starts, and can be written down."""
    return _UNSOUND.search(path) is None


def resolve_url(path: str) -> str:
    """Where the bytes of a file are asked for, by the `path` of its `FileRef`."""
    repo, _, rest = path.removeprefix(SCHEME).partition("@")
    sha, _, name = rest.partition("/")
    return f"{hub_endpoint()}/datasets/{repo}/resolve/{quote(sha, safe='')}/{quote(name)}"


def refused(address: str, refusal: Refused) -> PenstockError:
    """What a 4xx of the Hub means, and what to do. `address` is an hf:// one. Tokens are never shown."""
    repo, _, rest = address.removeprefix(SCHEME).partition("@")
    revision = rest.partition("/")[0]
    where = _shown(hub_endpoint())
    code = refusal.headers.get("x-error-code", "")
    sent = "A token was sent, and is not enough." if hub_token() else "No token was sent."
    login = "log in (`hf auth login`) or set HF_TOKEN"
    if code == "GatedRepo":
        return AccessDenied(
            f"{repo} is gated: accept its conditions at {where}/datasets/{repo}, then {login} to a token of the "
            f"account that accepted them. {sent}"
        )
    if code == "RevisionNotFound":
        return NoData(
            f"{repo} has no revision {unquote(revision)!r}. See {where}/datasets/{repo} for those it has."
        )
    if code == "EntryNotFound":
        return NoData(f"{address} does not exist.")
    if code == "RepoNotFound" or refusal.status in (401, 404):
        kind = NoData if refusal.status == 404 else AccessDenied
        return kind(
            f"There is no dataset {repo} at {where}, or it is private. See that the name is right (one without an "
            f"organisation is written hf://datasets/NAME@main/…); for private data {login} to a token that may read "
            f"it. {sent}"
        )
    if refusal.status in (403, 451):
        return AccessDenied(
            f"{address}: {where} refuses access ({refusal.status}). To get it, {login}. {sent}"
        )
    return RemoteError(f"{address}: {where} answered {refusal.status}.")


def _shown(endpoint: str) -> str:
    """The endpoint without a password that may stand in it."""
    scheme, _, rest = endpoint.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


class Hub:
    """Questions to the Hub, each one as few requests as it takes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._endpoint = hub_endpoint()

    def commit(self, name: HubName) -> str:
        """The commit that a branch or tag names now."""
        address = f"{SCHEME}{name.repo}@{quote(name.revision, safe='')}"
        url = f"{self._endpoint}/api/datasets/{name.repo}/revision/{quote(name.revision, safe='')}"
        try:
            found = self._json(url, address, dict)[1].get("sha")
        except Refused as refusal:
            raise refused(address, refusal) from None
        if not isinstance(found, str) or not _SHA.fullmatch(found):
            raise SourceError(
                f"{address}: {_shown(self._endpoint)} answered with {str(found)[:60]!r} for a commit"
            )
        return found.lower()

    def files(self, repo: str, sha: str, folder: str, *, recursive: bool) -> list[Entry] | None:
        """The files of a folder; None where there is no such folder."""
        address = f"{SCHEME}{repo}@{sha}" + (f"/{folder}" if folder else "")
        url = f"{self._endpoint}/api/datasets/{repo}/tree/{sha}" + (
            f"/{quote(folder)}" if folder else ""
        )
        url += f"?recursive={str(recursive).lower()}&expand=false"
        found: dict[str, Entry] = {}
        asked: set[str] = set()
        while url:
            if url in asked or len(found) > MAX_FILES:
                raise SourceError(f"{address}: its listing does not end, after {len(found)} files")
            asked.add(url)
            try:
                reply, page = self._json(url, address, list)
            except Refused as refusal:
                if _missing(refusal):
                    return None
                raise refused(address, refusal) from None
            for entry in _entries(page, address, folder):
                found[entry.path] = entry
            url = self._next(reply, address)
        return list(found.values())

    def card(self, repo: str, sha: str) -> str:
        """The dataset's card, or nothing."""
        address = f"{SCHEME}{repo}@{sha}/README.md"
        for left in reversed(range(TRIES)):
            try:
                # Let somewhat more come, so that one that is too long is told from one that is cut.
                reply = self._client.call(
                    resolve_url(address), what=address, token=hub_token(), max_bytes=16 * MAX_CARD
                )
            except Refused as refusal:
                if _missing(refusal):
                    return ""
                raise refused(address, refusal) from None
            if len(reply.body) > MAX_CARD:
                raise SourceError(
                    f"{address} is longer than {MAX_CARD} bytes: that is no card. Name the files: {FORM}"
                )
            card: str = reply.body.decode("utf-8", "replace")
            if not _is_cut(card):
                break
            if left:  # a proxy may have cut it; if it always ends there, it is written so
                self._client.pause(self._client.limits.backoff)
        return card

    def _json(self, url: str, address: str, kind: type) -> tuple[Reply, Any]:
        """An answer of the API, which must be of a kind."""
        for left in reversed(range(TRIES)):
            reply = self._client.call(url, what=address, token=hub_token())
            try:
                value = json.loads(reply.body)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, kind):
                return reply, value
            if left:
                self._client.pause(self._client.limits.backoff)
        came = reply.headers.get("content-type", "no type")[:40]
        raise RemoteError(
            f"{address}: {_shown(self._endpoint)} answered {TRIES} times with something that is no listing ({came!r}). "
            "A portal or proxy may be in the way."
        )

    def _next(self, reply: Reply, address: str) -> str:
        """Where the next page is; nothing after the last."""
        for link, rest in re.findall(r"<([^<>]*)>([^<]*)", reply.headers.get("link", "")):
            if re.search(r';\s*rel="?next"?', rest):
                url: str = urljoin(reply.url, link)
                if _origin(url) != _origin(self._endpoint):
                    raise SourceError(
                        f"{address}: the next page of its listing would not be at {_shown(self._endpoint)}, "
                        "so it was not asked for."
                    )
                return url
        return ""


def _is_cut(card: str) -> bool:
    """Whether a card ends before its front matter does: without it, other files would be taken for the data."""
    first, *lines = card.removeprefix("\ufeff").splitlines() or [""]
    return first.rstrip() in ("-", "--", "---") and all(line.rstrip() != "---" for line in lines)


class Known(Protocol):
    """Somebody who keeps answers, and asks where there is none: `what` says of what, for messages."""

    def __call__(
        self, kind: str, key: Sequence[Any], make: Callable[[], Any], what: str, *, moving: bool
    ) -> Any: ...


class Repository:
    """A commit of a dataset: files in folders, and a card. Nothing of it ever changes."""

    def __init__(self, client: Client, known: Known, repo: str, sha: str) -> None:
        self._hub, self._known = Hub(client), known
        self._repo, self._sha = repo, sha
        self._all: list[Entry] | None = None
        self.prefix = f"{SCHEME}{repo}@{sha}/"
        self.card = ""

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        """The files of a folder; none where there is no such folder."""
        if self._all is not None:
            return [
                entry for entry in self._all if not folder or entry.path.startswith(f"{folder}/")
            ]
        key = [hub_endpoint(), self._repo, self._sha, folder, recursive]
        make = partial(self._hub.files, self._repo, self._sha, folder, recursive=recursive)
        found = self._known(
            "listings", key, make, f"which files {self.prefix}{folder} has", moving=False
        )
        return [Entry(*row) for row in found or ()]

    def one(self, path: str) -> Entry | None:
        """A single file, if it is there."""
        return next(
            (entry for entry in self.below(path.rpartition("/")[0], False) if entry.path == path),
            None,
        )

    def read_all(self) -> None:
        """List everything: whatever is asked for later is among it."""
        self._all = self.below("", True)

    def read_card(self) -> None:
        key = [hub_endpoint(), self._repo, self._sha]
        make = partial(self._hub.card, self._repo, self._sha)
        self.card = self._known(
            "cards", key, make, f"the card {self.prefix}README.md", moving=False
        )


def _origin(url: str) -> tuple[str, str, int] | None:
    try:
        return Target(url).origin
    except ValueError:  # no such port
        return None


def _missing(refusal: Refused) -> bool:
    """Whether the repository and the revision are there, and the path is not."""
    return (
        refusal.status == 404
        and refusal.headers.get("x-error-code", "EntryNotFound") == "EntryNotFound"
    )


def _entries(page: list[Any], address: str, folder: str) -> Iterable[Entry]:
    """The files of a page, each one checked: a listing decides what is read and how it is called."""
    below = f"{folder}/" if folder else ""
    for item in page:
        if not isinstance(item, dict):
            raise SourceError(
                f"{address}: its listing has an entry that is none: {str(item)[:80]!r}"
            )
        path = item.get("path")
        if not isinstance(path, str) or not sound(path) or not path.startswith(below):
            raise SourceError(
                f"{address}: its listing has an entry that leads elsewhere: {str(path)[:300]!r}"
            )
        if item.get("type") != "file":
            continue
        large = item.get("lfs")
        size, etag = item.get("size"), (large if isinstance(large, dict) else item).get("oid", "")
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or size < 0
            or not isinstance(etag, str)
        ):
            raise SourceError(
                f"{address}: its listing gives {path} the size {size!r} and the ETag {etag!r}"
            )
        if etag and not sound(etag):
            raise SourceError(f"{address}: its listing gives {path} the ETag {etag[:80]!r}")
        yield Entry(path, size, etag)


__all__ = [
    "FORM", "SCHEME", "SHORT_NAMES", "Entry", "Hub", "HubName", "Known", "Repository", "parse", "refused",
    "resolve_url", "sound",
]  # fmt: skip
