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
import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlencode

from penstock.errors import ConfigError
from tests.servers.content import Shelf, Source
from tests.servers.loopback import Loopback
from tests.servers.reply import Call, Reply, reply_error, reply_file, reply_json
from tests.servers.repository import DATE, Commit, Entry, Repository

Gated = bool | Literal["files"]


class HubServer(Loopback):
    """A Hub with nothing in it yet; use it as a context manager."""

    def __init__(
        self, *, latency_s: float = 0.0, connect_latency_s: float = 0.0, bandwidth: float | None = None,
        page_size: int = 1000, redirect: bool = True, sign_for_s: float = 3600.0,
        cdn_etags: Literal["sha256", "other"] = "sha256", port: int = 0,
    ) -> None:  # fmt: skip
        """`latency_s`: waited before each answer. `connect_latency_s`: waited once more on a new connection.
        `bandwidth`: bytes per second of all connections together. `page_size`: items on a page of a listing.
        `redirect`: whether large files are sent by the second port. `sign_for_s`: how long an address is valid.
        `cdn_etags`: whether the second port's ETag is the digest that the Hub names, or one of its own.
        `port`: where the Hub listens; 0 takes a free one.
        """
        super().__init__(
            ("hub", "cdn"),
            latency_s=latency_s,
            connect_latency_s=connect_latency_s,
            bandwidth=bandwidth,
            port=port,
        )
        self.page_size = page_size
        self.redirect = redirect
        self.sign_for_s = sign_for_s
        self._cdn_etags = cdn_etags
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
        self, name: str, files: Mapping[str, Source], *, card: str = "", private: bool = False, gated: Gated = False,
        tokens: tuple[str, ...] = ("hf_secret",), denied_tokens: tuple[str, ...] = (),
    ) -> Repository:  # fmt: skip
        """Add a dataset repository. `card` becomes its README.md.

        `private`: for others than `tokens` it does not exist. `gated`: only `tokens` may read anything of it; or
        "files", as on the Hub, where everybody may see what there is and `tokens` may read it. `denied_tokens`:
        of users who are known, but have no access.
        """
        if name in self._repositories:
            raise ConfigError(f"{name} is there already: use its commit()")
        repository = Repository(
            name,
            self._shelf,
            private=private,
            gated=gated,
            tokens=tokens,
            denied_tokens=denied_tokens,
        )
        repository.commit({**files, "README.md": card.encode()} if card else files)
        with self._lock:
            self._repositories[name] = repository
        return repository

    def expire_signatures(self) -> None:
        """From now on the second port refuses every address that was given out before."""
        with self._lock:
            self._secret = secrets.token_bytes(16)

    # The second port

    def _signature(self, sha256: str, expires: str, name: str) -> str:
        with self._lock:
            return hmac.new(
                self._secret, f"{sha256}\n{expires}\n{name}".encode(), hashlib.sha256
            ).hexdigest()

    def _signed(self, call: Call, entry: Entry) -> str:
        sha256 = entry.content.sha256
        expires = f"{time.time() + self.sign_for_s:.3f}"
        query = {
            "Expires": expires,
            "For": call.path,
            "Signature": self._signature(sha256, expires, call.path),
        }
        return f"{self.cdn}/{sha256}?{urlencode(query)}"

    def _answer_cdn(self, call: Call) -> Reply:
        query = {name: values[-1] for name, values in parse_qs(call.query).items()}
        call.alias = query.get("For", "")
        sha256 = call.path.removeprefix("/")
        expires = query.get("Expires", "0")
        given = query.get("Signature", "").encode()
        if not hmac.compare_digest(self._signature(sha256, expires, call.alias).encode(), given):
            return reply_error(403, "SignatureDoesNotMatch")
        if time.time() > float(expires):
            return reply_error(403, "AccessDenied: this address has expired")
        with self._lock:
            repositories = list(self._repositories.values())
        for repository in repositories:
            if content := repository.stored(sha256):
                # Of the right form for storage that names a file by its parts, and never the digest itself.
                etag = (
                    sha256
                    if self._cdn_etags == "sha256"
                    else hashlib.md5(sha256.encode()).hexdigest() + "-1"
                )
                return reply_file(call, content, f'"{etag}"')
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
            case ["api", "whoami-v2"]:
                if self._known(call.token):
                    return reply_json(
                        {
                            "type": "user",
                            "name": "tester",
                            "orgs": [],
                            "auth": {"type": "access_token"},
                        }
                    )
                return reply_error(401, "Invalid username or password.")
            case ["api", "datasets", first, *rest]:
                return self._answer_api(call, *self._name(first, rest))
            case ["datasets", first, *rest]:
                name, rest = self._name(first, rest)
                match rest:
                    case ["resolve", revision, _, *_]:
                        return self._answer_resolve(call, name, revision, "/".join(rest[2:]))
        return reply_error(404, "Sorry, we can't find the page you are looking for.")

    def _name(self, first: str, rest: list[str]) -> tuple[str, list[str]]:
        """Tell a repository's name, of one part or two, from what follows it."""
        with self._lock:
            single = first in self._repositories
        return (first, rest) if single or not rest else (f"{first}/{rest[0]}", rest[1:])

    def _known(self, token: str) -> bool:
        with self._lock:
            repositories = list(self._repositories.values())
        return any(
            token in (*repository.tokens, *repository.denied_tokens) for repository in repositories
        )

    def _enter(self, call: Call, name: str, reads: bool) -> Repository | Reply:
        """The repository, or why this caller may not have it; `reads`: whether files' contents are asked for."""
        with self._lock:
            repository = self._repositories.get(name)
        granted = repository is not None and call.token in repository.tokens
        if repository is None or (repository.private and not granted):
            status = 404 if self._known(call.token) else 401
            message = "Repository not found" if status == 404 else "Invalid username or password."
            return reply_error(
                status, message, {"X-Error-Code": "RepoNotFound", "X-Error-Message": message}
            )
        if repository.gated and not granted and (reads or repository.gated != "files"):
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
        repository = self._enter(call, name, reads=False)
        if isinstance(repository, Reply):
            return repository
        if rest == ["refs"]:
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
                for name, sha in repository.branches().items()
            ]
            return reply_json({"branches": branches, "converts": [], "tags": []})
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
            "author": repository.name.partition("/")[0],
            "sha": commit.sha,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": repository.private,
            "gated": "auto" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(commit.entries)],
        }

    def _tree(self, call: Call, commit: Commit, folder: str) -> Reply:
        query = {name: values[-1] for name, values in parse_qs(call.query).items()}
        items = commit.below(folder, _true(query.get("recursive")))
        if items is None:
            return self._no_entry(commit, f"This folder does not exist on {commit.sha}")
        limit = query.get("limit", "")
        size = (
            min(self.page_size, int(limit))
            if limit.isdecimal() and int(limit) > 0
            else self.page_size
        )
        if cursor := query.get("cursor"):
            try:
                last = base64.urlsafe_b64decode(cursor).decode()
            except ValueError:
                return reply_error(400, "Invalid cursor")
            items = [item for item in items if item["path"] > last]
        page = items[:size]
        headers = {"X-Repo-Commit": commit.sha}
        if len(items) > size:
            query["cursor"] = base64.urlsafe_b64encode(page[-1]["path"].encode()).decode()
            path = call.target.partition("?")[0]
            headers["Link"] = f'<{self.endpoint}{path}?{urlencode(query)}>; rel="next"'
        return reply_json(_expanded(page, commit) if _true(query.get("expand")) else page, headers)

    def _paths_info(self, call: Call, commit: Commit) -> Reply:
        if call.headers.get("content-type", "").startswith("application/json"):
            try:
                asked = json.loads(call.body)
                paths, expand = asked["paths"], bool(asked.get("expand"))
            except (ValueError, KeyError, TypeError):
                return reply_error(400, "The body needs a list called paths")
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
        repository = self._enter(call, name, reads=True)
        if isinstance(repository, Reply):
            return repository
        commit = self._commit(repository, revision)
        if isinstance(commit, Reply):
            return commit
        entry = commit.entries.get(path)
        if entry is None:
            return self._no_entry(commit, "Entry not found")
        headers = {"X-Repo-Commit": commit.sha}
        if entry.large:
            headers |= {"X-Linked-Etag": entry.etag, "X-Linked-Size": str(entry.content.size)}
            if self.redirect:
                return Reply(302, {**headers, "Location": self._signed(call, entry)})
        shown = quote(path.rpartition("/")[2])
        headers["Content-Disposition"] = f"inline; filename*=UTF-8''{shown}"
        return reply_file(call, entry.content, entry.etag, headers)


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("true", "1")


def _expanded(items: list[dict[str, Any]], commit: Commit) -> list[dict[str, Any]]:
    last = {"id": commit.sha, "title": "Upload", "date": DATE}
    return [{**item, "lastCommit": last} for item in items]
