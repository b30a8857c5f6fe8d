"""Datasets and storage buckets on the Hugging Face Hub: names, commits, listings and cards.

The conventions are those of `huggingface_hub` (endpoint, token, offline mode). Its client is not
used: it has no deadlines, sleeps between its own retries, cannot be cancelled, sends the token to
wherever the next page of a listing is, and its import adds 0.3 s to the first batch.

Listings and cards are written by strangers: they can name files of their own repository and
nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urljoin

from penstock.config import hub_endpoint, hub_token
from penstock.errors import ConfigError, RemoteError, SourceError, missing_extra
from penstock.read.http import Network, Place, Refused, RequestError, Response
from penstock.read.listing import Entry, classify, is_marker
from penstock.types import Format

T = TypeVar("T")

FORM = "hf://datasets/ORG/NAME[@revision]/path-or-glob"
BUCKET = "hf://buckets/"
ABOUT = re.compile(r"(?:^|/)(?:README\.md|config\.json|dataset_(?:infos?|dict)\.json)$|\.py$")
MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by listings and cards of another form, or nested too deep."""

_SHA = re.compile(r"[0-9a-f]{40}")
_REPO = r"\w[\w.-]{0,95}+/\w[\w.-]{0,95}+"
_ADDRESS = re.compile(
    rf"hf://(?P<kind>datasets|buckets)/(?P<repo>{_REPO})"
    r"(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)|[^/\s]+))?(?:/(?P<path>.*))?",
    re.ASCII,
)
_UNSOUND = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]|(?:^|/)\.{0,2}(?:/|\Z)")
"""Control characters, backslashes, half characters; empty parts, `.` and `..`."""
_TRAIN = re.compile(r"(?:^|[/._\-0-9])train(?:[/._\-0-9]|$)")


class HubName(NamedTuple):
    """What an address names."""

    repo: str
    revision: str
    """Empty for a bucket, which has no commits."""
    path: str
    """A file, a folder or a glob; empty for the whole repository."""


def parse(url: str) -> HubName:
    """Return what an hf:// address names, or raise an error that shows how to write one."""
    if found := _ADDRESS.fullmatch(url):
        repo, path = found["repo"], (found["path"] or "").removesuffix("/")
        bucket, revision = found["kind"] == "buckets", unquote(found["revision"] or "main")
        if sound(f"{revision}/{path or 'all'}") and not (bucket and found["revision"]):
            return HubName(repo, "" if bucket else revision, path)
    raise ConfigError(f"{url}: needs the form {FORM} or {BUCKET}ORG/NAME/path-or-glob")


def sound(path: str) -> bool:
    """Return True if a path stays below where it starts, and can be written down."""
    return _UNSOUND.search(path) is None


def resolve_url(path: str) -> str:
    """Return the address of a file's bytes, by the `path` of its `FileRef`."""
    kind, org, name, file = path.removeprefix("hf://").split("/", 3)
    name, _, sha = name.partition("@")
    start = f"{sha}/" if sha else ""
    return f"{hub_endpoint()}/{kind}/{org}/{name}/resolve/{start}{quote(file)}"


def refusal(address: str, refused: Refused) -> SourceError:
    """Return the error for a 4xx of the Hub, which says what to do. Tokens are never shown."""
    kind, repo = re.findall(rf"hf://(\w+)/({_REPO})", address)[0]
    page = f"{hub_endpoint().rpartition('@')[2]}/{kind}/{repo}"
    sent = "A token was sent, and is not enough." if hub_token() else "No token was sent."
    login = f"log in (`hf auth login`) or set HF_TOKEN. {sent}"
    if refused.code == "GatedRepo":
        return SourceError(f"{repo} is gated: accept its conditions at {page}, then {login}")
    if refused.code in ("RevisionNotFound", "EntryNotFound"):
        return SourceError(f"{address} does not exist. See {page}")
    if refused.code == "RepoNotFound" or refused.status in (401, 404):
        text = f"There is no {kind[:-1]} {repo} (see {page}), or it is private"
        return SourceError(f"{text}; for private data {login}")
    return SourceError(f"{address}: access is refused ({refused.status}); {login}")


# Listings


class Repository:
    """The files of a commit, or of a storage bucket, whose content may change."""

    def __init__(self, network: Network, known: Callable[..., Any], name: HubName) -> None:
        self._network, self._known, self._repo = network, known, name.repo
        self._all: list[Entry] | None = None
        self._sha, self.is_bucket = name.revision, not name.revision
        if self.is_bucket:
            self.prefix = f"{BUCKET}{name.repo}/"
            return
        if not _SHA.fullmatch(name.revision):  # a branch may have moved, so the Hub is asked
            key = [f"hf://datasets/{name.repo}@{name.revision}", hub_endpoint()]
            self._sha = known("revisions", key, partial(self._commit, key[0]), moving=True)
        self.prefix = f"hf://datasets/{name.repo}@{self._sha}/"

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        """Return the files of a folder; none if there is no such folder."""
        found = self._listed(folder, recursive) if self._all is None else self._all
        return [e for e in found if not folder or e.name.startswith(f"{folder}/")]

    def one(self, path: str) -> Entry | None:
        """Return a single file, if it exists."""
        folder = path.rpartition("/")[0]
        near = self._listed(path, True) if self.is_bucket else self.below(folder, False)
        return next((entry for entry in near if entry.name == path), None)

    def _listed(self, folder: str, recursive: bool) -> list[Entry]:
        """Return a folder's files; in a bucket, all files whose paths begin with this text."""
        key = [f"{self.prefix}{folder}", recursive, hub_endpoint()]
        make = partial(self._list, folder, recursive)
        return [Entry(*row) for row in self._known("listings", key, make, moving=self.is_bucket)]

    def list_all(self) -> None:
        """List all files at once; later calls use the result."""
        self._all = self.below("", True)

    def card(self) -> str:
        """Return the dataset's card, or nothing."""
        address = f"{self.prefix}README.md"

        def read(response: Response) -> str:
            text = response.body().decode("utf-8", "replace")
            # Without its front matter, other files would be read as the data.
            if text.startswith("-") and "\n---" not in text:
                error = SourceError(f"{address}: its front matter does not end. Name files: {FORM}")
                raise RequestError("cut", error)
            return text

        make = partial(self._get, resolve_url(address), address, read, "")
        return str(self._known("cards", [address, hub_endpoint()], make, moving=False))

    def _get(
        self, url: str, address: str, read: Callable[[Response], T], missing: T | None = None
    ) -> T:
        """Return `read` of the Hub's response, or `missing` if the path does not exist."""
        try:
            return self._network.get(url, address, read, hub_token())
        except Refused as refused:
            no_entry = refused.status == 404 and refused.code in ("", "EntryNotFound")
            if missing is not None and no_entry:
                return missing
            raise refusal(address, refused) from None

    def _api(self, url: str, address: str, missing: Any = None) -> tuple[Any, str]:
        """Return the JSON of an API call, and its Link header."""

        def read(response: Response) -> tuple[Any, str]:
            with suppress(ValueError, RecursionError):
                if isinstance(value := json.loads(response.body()), list | dict):
                    return value, response.headers.get("link", "")
            text = f"{address}: the Hub's answer is not a listing. Does a portal or proxy answer?"
            raise RequestError("json", RemoteError(text))

        found: tuple[Any, str] = self._get(url, address, read, missing)
        return found

    def _commit(self, address: str) -> str:
        url = f"{hub_endpoint()}/api/datasets/{self._repo}/revision/{quote(self._sha, safe='')}"
        answer, _ = self._api(url, address)
        found = str(answer.get("sha") if isinstance(answer, dict) else answer)
        if not _SHA.fullmatch(found):
            raise SourceError(f"{address}: the Hub answered {found[:60]!r} for a commit")
        return found

    def _list(self, folder: str, recursive: bool) -> list[Entry]:
        address = f"{self.prefix}{folder}"
        path = quote(f"datasets/{self._repo}/tree/{self._sha}/{folder}".removesuffix("/"))
        query = f"recursive={str(recursive).lower()}&expand=false"
        start, tag = f"{folder}/" if folder else "", "oid"
        if self.is_bucket:  # the Hub matches prefixes of paths there
            path = f"buckets/{self._repo}/tree/{quote(folder, safe='')}".removesuffix("/")
            query, start, tag = "recursive=true", folder, "xetHash"
        url = f"{hub_endpoint()}/api/{path}?{query}"
        found: dict[str, Entry] = {}
        while url:
            page, link = self._api(url, address, ([], ""))
            found.update((entry.name, entry) for entry in _entries(page, address, start, tag))
            following = re.search(r'<([^<>]*)>;\s*rel="?next"?', link)
            url = urljoin(url, following[1]) if following else ""
            if url and Place(url).origin != Place(hub_endpoint()).origin:
                raise SourceError(f"{address}: the next page of its listing is on another server")
        return list(found.values())


def _entries(page: list[Any], address: str, start: str, tag: str) -> Iterable[Entry]:
    """Return the files of a page, each one checked. `tag` names the field with the version."""
    try:
        for item in page:
            if item["type"] == "file":
                path, etag = item["path"], (item.get("lfs") or item)[tag]
                if not (
                    path.startswith(start) and sound(path) and sound(etag) and item["size"] >= 0
                ):
                    raise ValueError("the path is not in the folder")
                yield Entry(path, item["size"], etag)
    except MALFORMED as error:
        wrong = f"an entry of its listing is malformed: {error!r:.100}: {item!r:.300}"
        raise SourceError(f"{address}: {wrong}") from None


# Cards


Configurations = dict[str, tuple[str, list[str]]]
"""The folder and the patterns of each NAME and NAME/SPLIT."""


def configurations(text: str, where: str) -> tuple[Configurations, str]:
    """Return the configurations in a card, and the name of the default."""
    head = re.match(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", text, re.DOTALL | re.MULTILINE)
    if head is None or "configs" not in head[1]:
        return {}, ""
    try:
        import yaml
    except ImportError:
        raise missing_extra("pyyaml", "reading a dataset card", "hf") from None
    found: Configurations = {}
    default = ""
    try:
        configs = yaml.safe_load(head[1]).get("configs") or []
        for item in configs:
            name, splits = _plain(item.get("config_name", "default")), _splits(item)
            folder = _plain(item.get("data_dir") or "")
            found |= {f"{name}/{split}": (folder, patterns) for split, patterns in splits.items()}
            if len(splits) < 2 or "train" in splits:
                found[name] = folder, splits.get("train", next(iter(splits.values()), []))
            if item.get("default") is True or len(configs) == 1:
                default = default or name
    except (yaml.YAMLError, *MALFORMED) as error:
        why = " ".join(str(error).split())[:200]
        advice = "Name the files instead: …/NAME/path-or-glob"
        raise SourceError(f"{where} cannot be parsed: {why}. {advice}") from None
    return found, default or "default"


def _splits(item: dict[str, Any]) -> dict[str, list[str]]:
    """Return the patterns of each split. `data_files` is a pattern, or a list of them or of splits."""
    files = item.get("data_files") or []
    splits: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        split = entry if isinstance(entry, dict) else {"path": entry}
        paths = split["path"] if isinstance(split["path"], list) else [split["path"]]
        splits.setdefault(_plain(split.get("split", "train")), []).extend(map(_plain, paths))
    return splits


def _plain(value: Any) -> str:
    # The value is not shown: a few lines of YAML references can expand to gigabytes.
    if not isinstance(value, str | int | float):
        raise TypeError(f"a name or path is a {type(value).__name__}")
    return str(value)


def choose(text: str, wanted: str | None, where: str) -> tuple[str, list[str] | None]:
    """Return the folder and the patterns of a card's configuration; None for all data files."""
    table, default = configurations(text, where)
    if wanted is None and not table:
        return "", None
    if (wanted or default) not in table:
        names = ", ".join(f"config={name!r}" for name in table)
        missing = f"has no configuration or split {wanted or default!r}"
        raise ConfigError(f"{where}: {missing}. Choose: {names}")
    folder, patterns = table[wanted or default]
    folder = "" if folder in ("", ".", "./") else _confined(folder, "", where)
    return folder, [_confined(pattern, folder, where) for pattern in patterns] or None


def _confined(pattern: str, folder: str, where: str) -> str:
    """Return a pattern as a path in its own repository, or raise."""
    path = pattern.removeprefix("./").removesuffix("/")
    if path in ("", "."):
        return folder or "**"
    if "://" in pattern or not sound(path):
        advice = "A card can name files of its own repository only; give other addresses yourself."
        raise ConfigError(f"{where}: its data_files name {pattern[:300]!r}. {advice}")
    return f"{folder}/{path}" if folder else path


def data_files(entries: Iterable[Entry], where: str, format: Format | None) -> list[Entry]:
    """Return the data files of a repository without configurations: one format, for training."""
    rest = [e for e in entries if not is_marker(e.name) and not ABOUT.search(e.name)]
    for kind in ("parquet", "jsonl", "text"):
        found = [e for e in rest if (classify(e.name) or ("",))[0] == kind]
        if found and format in (None, kind):
            return [e for e in found if _TRAIN.search(e.name.lower())] or found
    if format is not None and rest:
        return rest
    advice = "Name some: …/NAME/path-or-glob"
    raise SourceError(f"{where}: none of its files is Parquet, JSONL or text. {advice}")
