"""Files in buckets: s3://, gs://, az:// and abfss://, through `obstore`.

obstore's own retries are off: `Network.retry` retries, counts and gives up. obstore's timeouts
bound each blocking call; the deadline is checked between the parts of a body. Credentials come from
the environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import pyarrow as pa

from penstock.config import environment
from penstock.errors import ConfigError, SourceError, missing_extra
from penstock.read.http import RETRY, Deadline, Network, RequestError, plain_etag
from penstock.read.hub import sound
from penstock.read.listing import Entry

T = TypeVar("T")
Call = Callable[[Any, Any, Deadline], T]
"""A function of obstore, the store and a deadline."""

Known = Callable[..., Any]

LOGIN = {
    "s": "Set AWS_REGION, and AWS_PROFILE or AWS_ACCESS_KEY_ID; if public AWS_SKIP_SIGNATURE=true.",
    "g": "Run `gcloud auth application-default login`; if public GOOGLE_SKIP_SIGNATURE=true.",
    "a": "Set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or, after `az login`, "
    "AZURE_USE_AZURE_CLI=true; if public AZURE_SKIP_SIGNATURE=true.",
}
"""What to set for access, by the first letter of the scheme."""


def place(url: str) -> tuple[str, str]:
    """Split a URL into the address of a bucket, and a key, prefix or glob in it."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    bucket, _, key = rest.partition("/")
    key = key.removesuffix("/")
    form = "abfss://container@account.dfs.core.windows.net" if scheme[0] == "a" else f"{scheme}://bucket"  # fmt: skip
    login = "@" in bucket and not scheme.startswith("abfs")
    if not bucket or login or re.search(r"[\s:\\\0]", bucket) or (key and not sound(key)):
        raise ConfigError(f"{scheme}://…: bucket or path does not fit; the form is {form}/path")
    return f"{scheme}://{bucket}", key


class Bucket:
    """A bucket, or a prefix in one."""

    def __init__(
        self, network: Network, root: str, known: Known = lambda kind, key, make, moving: make()
    ) -> None:
        """`known` caches listings."""
        self._network, self._root, self._known = network, root, known
        self.prefix = f"{root}/"

    def call(self, name: str, function: Call[T], setting: str = "retry_budget") -> T:
        """Call a function of obstore, the store and a deadline, with retries within the budget.

        Raise FileNotFoundError if there is no such file, bucket or range.
        """
        attempt = partial(self._try, f"{self.prefix}{name}", function)
        return self._network.retry(f"{self.prefix}{name}", attempt, setting)

    def _try(self, where: str, function: Call[T], deadline: Deadline) -> T:
        obstore = _obstore(where)
        self._network.stats.add(requests=1)
        try:
            return function(obstore, self._store, deadline)
        except (FileNotFoundError, obstore.exceptions.BaseError) as error:
            failed = _explained(error, where)
        raise failed  # outside `except`, to drop the original, which quotes secrets

    # Listings

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        """Return the files below a folder."""
        return self._kept([f"{self.prefix}{folder}", recursive], self.entries, folder, recursive)

    def one(self, key: str) -> Entry | None:
        """Return a single file, if it exists."""
        return next(iter(self._kept([f"{self.prefix}{key}"], self._head, key)), None)

    def _kept(self, key: list[Any], ask: Callable[..., list[Entry]], *what: Any) -> list[Entry]:
        rows = self._known("listings", key, partial(ask, *what), moving=True)
        return [Entry(*row) for row in rows]

    def entries(self, folder: str = "", recursive: bool = True) -> list[Entry]:
        def list_all(obstore: Any, store: Any, deadline: Deadline) -> list[Entry]:
            found, prefix = [], folder or None
            pages = obstore.list(store, prefix)
            if not recursive:
                pages = [obstore.list_with_delimiter(store, prefix)["objects"]]
            for page in pages:
                deadline.timeout_s()
                # Empty objects represent folders.
                found += [_entry(meta) for meta in page if meta["size"]]
            return found

        try:
            return self.call(folder, list_all, "metadata_budget")
        except FileNotFoundError:
            raise SourceError(f"{self._root} does not exist.") from None

    def _head(self, key: str) -> list[Entry]:
        def head(obstore: Any, store: Any, _: Deadline) -> Entry:
            return _entry(obstore.head(store, key))

        with suppress(FileNotFoundError):
            return [self.call(key, head, "metadata_budget")]
        return []

    # Whole objects

    def exists(self, key: str) -> bool:
        return bool(self._head(key))

    def read(self, key: str, start: int, length: int) -> pa.Buffer:
        """Return a range of an object, shorter at its end."""
        how = {"start": start, "length": length}
        return pa.py_buffer(self.call(key, lambda obs, store, _: obs.get_range(store, key, **how)))

    def write(self, key: str, parts: Sequence[Any], _: int) -> bool:
        data = b"".join(parts)
        self.call(key, lambda obstore, store, _: obstore.put(store, key, data))
        return True

    def remove(self, keys: Sequence[str]) -> None:
        self.call("", lambda obstore, store, _: obstore.delete(store, [*keys]))

    # Ranges

    def read_into(
        self, key: str, start: int, view: memoryview, deadline: Deadline
    ) -> tuple[str, int]:
        """Fill a buffer from a range of a file. Return the file's ETag and size."""
        began, at = time.perf_counter(), 0

        def read(obstore: Any, store: Any, deadline: Deadline) -> Any:
            nonlocal at
            result = obstore.get(store, key, options={"range": (start, start + len(view))})
            for part in result.stream(min_chunk_size=1):
                deadline.timeout_s()
                deadline.received(len(part))
                if at + len(part) > len(view):
                    raise RequestError("long", f"received more than {len(view)} bytes")
                view[at : at + len(part)] = memoryview(part)
                at += len(part)
            return result.meta

        try:
            meta = self._try(f"{self.prefix}{key}", read, deadline)
        except FileNotFoundError as error:
            text = f"{error} is gone or shorter. Restore it, or start a new run."
            raise RequestError("status_404", SourceError(text)) from None
        finally:
            self._network.stats.add(bytes=at, body_s=time.perf_counter() - began)
        if at != len(view):
            raise RequestError("short", f"{at} bytes instead of {len(view)}")
        return plain_etag(meta["e_tag"] or ""), meta["size"]

    @cached_property
    def _store(self) -> Any:
        from obstore.store import from_url

        limits, url = self._network.limits, self._root
        options: Any = {
            "connect_timeout": timedelta(seconds=limits.connect_timeout),
            "timeout": timedelta(seconds=limits.request_timeout),
            "read_timeout": timedelta(seconds=limits.stall_timeout),
            "allow_http": True,  # only if the user names such an endpoint
            "user_agent": "penstock",
        }
        more: dict[str, Any] = _s3_credentials() if url[0] == "s" else {}
        try:
            return from_url(url, client_options=options, retry_config={"max_retries": 0}, **more)
        except Exception as error:  # obstore raises a different exception for each missing setting
            raise ConfigError(f"{url}: {_clean(str(error))}. {LOGIN[url[0]]}") from None


def _obstore(where: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        needed_for = f"reading {where.partition('://')[0]}://"
        raise missing_extra("obstore", needed_for, "buckets") from None


def _entry(meta: Any) -> Entry:
    # Azure quotes ETags in responses but not in listings.
    return Entry(meta["path"], meta["size"], plain_etag(meta["e_tag"] or ""))


# Credentials


def _s3_credentials() -> dict[str, Any]:
    """Return the credentials of boto3, if it is installed and the environment has no keys.

    boto3 supports profiles, SSO and instance roles. Without credentials, requests are not signed:
    public buckets can be read, and others deny access at once.
    """
    given = environment().get("AWS_ACCESS_KEY_ID") or environment().get("AWS_SKIP_SIGNATURE")
    if given or importlib.util.find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # boto3 finds no credentials
        return {"skip_signature": True}


# Errors


def _explained(error: Exception, where: str) -> Exception:
    """Convert an exception of obstore, removing the secrets in its text."""
    said = str(error).partition("\n\nDebug source")[0]
    found = re.search(r"status code: (\d{3})", said)
    status = int(found[1]) if found else 0
    if isinstance(error, FileNotFoundError) or status in (404, 416):
        return FileNotFoundError(where)
    denied = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    denied = denied or 0 < status < 500 or "configured region" in said
    if status in RETRY or not denied:
        return RequestError(f"status_{status}" if status else "bucket", _clean(said))
    code = re.search(r"<Code>(\w{1,60})</Code>", said)
    text = f"{where}: access is refused{f' ({code[1]})' if code else ''}. {LOGIN[where[0]]}"
    return RequestError("denied", SourceError(text))


def _clean(text: str) -> str:
    """Return the first part of a message, with logins and queries removed from addresses."""
    said = " ".join(text.partition("\n\nDebug source")[0].split())
    return re.sub(r"(?<=//)[^/\s@]*@|\?\S*", "", said)[:240].rstrip(". ")
