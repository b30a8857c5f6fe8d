"""A stand-in for the Hugging Face Hub on loopback: listings, commits, signed redirects, gated repositories.

In:    repositories, by `add()`.
Out:   what `huggingface_hub`, `datasets` and other clients ask of the Hub for datasets, on one port, and the
       bytes of large files on a second one (the "cdn"), to which the first redirects with signed addresses.
Where: the threads of connections.
State: the repositories, and the secret by which addresses are signed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

from tests.servers.content import Shelf, Source
from tests.servers.loopback import Loopback
from tests.servers.reply import Call, Reply, reply_error, reply_file, reply_json
from tests.servers.repository import DATE, Commit, Entry, Repository


class HubServer(Loopback):
    """A Hub with nothing in it yet; use it as a context manager."""

    def __init__(
        self, *, latency_s: float = 0.0, bandwidth: float | None = None, page_size: int = 1000, port: int = 0
    ) -> None:  # fmt: skip
        """`latency_s`: waited before each answer. `bandwidth`: bytes per second of all connections
        together. `page_size`: items on a page of a listing.
        """
        super().__init__(("hub", "cdn"), latency_s=latency_s, bandwidth=bandwidth, port=port)
        self.page_size = page_size
        self._secret = secrets.token_bytes(16)
        self._shelf = Shelf()
        self._repositories: dict[str, Repository] = {}
        self._listen()

    @property
    def endpoint(self) -> str:
        """What goes into `HF_ENDPOINT`."""
        return self._addresses["hub"]

    @property
    def cdn(self) -> str:
        """Where the bytes of large files come from."""
        return self._addresses["cdn"]

    def add(
        self, name: str, files: Mapping[str, Source], *, card: str = "", private: bool = False, gated: bool = False,
        tokens: tuple[str, ...] = ("hf_secret",), denied_tokens: tuple[str, ...] = (),
    ) -> Repository:  # fmt: skip
        """Add a dataset repository. `card` becomes its README.md.

        `private`: for others than `tokens` it does not exist. `gated`: only `tokens` may read anything
        of it. `denied_tokens`: of users who are known, but have no access.
        """
        access = {
            "private": private,
            "gated": gated,
            "tokens": tokens,
            "denied_tokens": denied_tokens,
        }
        repository = Repository(name, self._shelf, **access)  # type: ignore[arg-type]
        repository.commit({**files, "README.md": card.encode()} if card else files)
        with self._lock:
            self._repositories[name] = repository
        return repository

    def add_bucket(self, name: str, files: Mapping[str, Source], **access: Any) -> Repository:
        """Add a storage bucket; its `commit` replaces files in place."""
        return self.add(f"buckets/{name}", files, **access)

    def expire_signatures(self) -> None:
        """From now on the second port refuses every address that was given out before."""
        with self._lock:
            self._secret = secrets.token_bytes(16)

    # The second port

    def _signature(self, sha256: str, name: str) -> str:
        with self._lock:
            return hmac.new(self._secret, f"{sha256}\n{name}".encode(), hashlib.sha256).hexdigest()

    def _signed(self, call: Call, entry: Entry) -> str:
        sha256 = entry.content.sha256
        query = {"For": call.path, "Signature": self._signature(sha256, call.path)}
        return f"{self.cdn}/{sha256}?{urlencode(query)}"

    def _answer_cdn(self, call: Call) -> Reply:
        query = {name: values[-1] for name, values in parse_qs(call.query).items()}
        call.alias = query.get("For", "")
        sha256 = call.path.removeprefix("/")
        if query.get("Signature") != self._signature(sha256, call.alias):
            return reply_error(403, "SignatureDoesNotMatch")
        with self._lock:
            repositories = list(self._repositories.values())
        for repository in repositories:
            if content := repository.stored(sha256):
                return reply_file(call, content, f'"{sha256}"')
        return reply_error(404, "NoSuchKey")

    # The Hub

    def answer(self, call: Call) -> Reply:
        if call.method not in ("GET", "HEAD", "POST"):
            return reply_error(405, f"{call.method} is not possible here")
        if call.port == "cdn":
            return self._answer_cdn(call)
        # Split before it is unquoted: a revision such as refs%2Fconvert%2Fparquet is one part.
        parts = [
            unquote(part.encode("latin-1")) for part in call.target.partition("?")[0].split("/")[1:]
        ]
        match parts:
            case ["api", "buckets", org, name, "tree", *prefix]:
                return self._bucket_tree(call, f"buckets/{org}/{name}", "".join(prefix))
            case ["buckets", org, name, "resolve", *path]:
                return self._answer_resolve(call, f"buckets/{org}/{name}", "main", "/".join(path))
            case ["api", "datasets", org, name, *rest]:
                return self._answer_api(call, f"{org}/{name}", rest)
            case ["datasets", org, name, "resolve", revision, *path]:
                return self._answer_resolve(call, f"{org}/{name}", revision, "/".join(path))
        return reply_error(404, "Sorry, we can't find the page you are looking for.")

    def _known(self, token: str) -> bool:
        with self._lock:
            repositories = list(self._repositories.values())
        return any(
            token in (*repository.tokens, *repository.denied_tokens) for repository in repositories
        )

    def _enter(self, call: Call, name: str) -> Repository | Reply:
        """The repository, or why this caller may not have it."""
        with self._lock:
            repository = self._repositories.get(name)
        granted = repository is not None and call.token in repository.tokens
        if repository is None or (repository.private and not granted):
            status = 404 if self._known(call.token) else 401
            message = "Repository not found" if status == 404 else "Invalid username or password."
            return reply_error(
                status, message, {"X-Error-Code": "RepoNotFound", "X-Error-Message": message}
            )
        if repository.gated and not granted:
            status = 403 if self._known(call.token) else 401
            message = f"Access to dataset {name} is restricted. You must have access to it and be authenticated."
            return reply_error(
                status, message, {"X-Error-Code": "GatedRepo", "X-Error-Message": message}
            )
        return repository

    def _commit(self, repository: Repository, revision: str) -> Commit | Reply:
        commit = repository.at(revision)
        if commit is None:
            message = f"Invalid rev id: {revision}"
            return reply_error(
                404, message, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": message}
            )
        return commit

    def _answer_api(self, call: Call, name: str, rest: list[str]) -> Reply:
        repository = self._enter(call, name)
        if isinstance(repository, Reply):
            return repository
        commit = self._commit(repository, rest[1] if len(rest) > 1 else "main")
        if isinstance(commit, Reply):
            return commit
        match rest:
            case [] | ["revision", _]:
                return reply_json(self._info(repository, commit))
            case ["tree", _, *folders]:
                return self._tree(call, commit, "/".join(folders).strip("/"))
            case ["paths-info", _]:
                return self._paths_info(call, commit)
        return reply_error(404, "Not found")

    def _info(self, repository: Repository, commit: Commit) -> dict[str, Any]:
        return {
            "_id": hashlib.sha1(repository.name.encode()).hexdigest()[:24],
            "id": repository.name,
            "sha": commit.sha,
            "lastModified": DATE,
            "private": repository.private,
            "gated": "auto" if repository.gated else False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(commit.entries)],
        }

    def _bucket_tree(self, call: Call, name: str, prefix: str) -> Reply:
        repository = self._enter(call, name)
        if isinstance(repository, Reply):
            return repository
        commit = repository.at("main")
        assert commit is not None
        items = [
            {"type": "file", "path": path, "size": entry.content.size, "xetHash": entry.xet_hash}
            for path, entry in sorted(commit.entries.items())
            if path.startswith(prefix)
        ]
        return self._page(call, items, {})

    def _tree(self, call: Call, commit: Commit, folder: str) -> Reply:
        query = parse_qs(call.query)
        items = commit.below(folder, _true(query.get("recursive", [""])[-1]))
        if items is None:
            return self._no_entry(commit, f"This folder does not exist on {commit.sha}")
        items = _expanded(items, commit) if _true(query.get("expand", [""])[-1]) else items
        return self._page(call, items, {"X-Repo-Commit": commit.sha})

    def _page(self, call: Call, items: list[dict[str, Any]], headers: dict[str, str]) -> Reply:
        query = {name: values[-1] for name, values in parse_qs(call.query).items()}
        if cursor := query.get("cursor"):
            last = base64.urlsafe_b64decode(cursor).decode()
            items = [item for item in items if item["path"] > last]
        size = self.page_size
        page = items[:size]
        if len(items) > size:
            query["cursor"] = base64.urlsafe_b64encode(page[-1]["path"].encode()).decode()
            path = call.target.partition("?")[0]
            headers["Link"] = f'<{self.endpoint}{path}?{urlencode(query)}>; rel="next"'
        return reply_json(page, headers)

    def _paths_info(self, call: Call, commit: Commit) -> Reply:
        if call.headers.get("content-type", "").startswith("application/json"):
            asked = json.loads(call.body)
            paths, expand = asked["paths"], bool(asked.get("expand"))
        else:
            form = parse_qs(call.body.decode())
            paths, expand = form.get("paths", []), _true(form.get("expand", [""])[-1])
        wanted = {path.strip("/") for path in paths}
        found = [item for item in commit.items() if item["path"] in wanted]
        return reply_json(_expanded(found, commit) if expand else found)

    def _no_entry(self, commit: Commit, message: str) -> Reply:
        headers = {
            "X-Error-Code": "EntryNotFound",
            "X-Error-Message": message,
            "X-Repo-Commit": commit.sha,
        }
        return reply_error(404, message, headers)

    def _answer_resolve(self, call: Call, name: str, revision: str, path: str) -> Reply:
        repository = self._enter(call, name)
        if isinstance(repository, Reply):
            return repository
        commit = self._commit(repository, revision)
        if isinstance(commit, Reply):
            return commit
        entry = commit.entries.get(path)
        if entry is None:
            return self._no_entry(commit, "Entry not found")
        headers = {"X-Repo-Commit": commit.sha, "X-Xet-Hash": entry.xet_hash}
        if entry.large or name.startswith("buckets/"):
            headers |= {"X-Linked-Etag": entry.etag, "X-Linked-Size": str(entry.content.size)}
            return Reply(302, {**headers, "Location": self._signed(call, entry)})
        return reply_file(call, entry.content, entry.etag, headers)


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("true", "1")


def _expanded(items: list[dict[str, Any]], commit: Commit) -> list[dict[str, Any]]:
    last = {"id": commit.sha, "title": "Upload", "date": DATE}
    return [{**item, "lastCommit": last} for item in items]
