"""Files in buckets: s3://, gs://, az:// and abfss://, through `obstore`.

obstore's own retries are off: `Network.retry` retries, counts and gives up. Its timeouts bound
whatever blocks, and the deadline is checked between the parts of a body. Credentials are those of
the user's environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import environment
from penstock.errors import ConfigError, SourceError, missing_extra
from penstock.read.http import RETRY, Deadline, RequestError, plain_etag
from penstock.read.hub import sound
from penstock.read.listing import Entry

if TYPE_CHECKING:
    from penstock.read.remote_files import Network

T = TypeVar("T")
Call = Callable[[Any, Any, Deadline], T]
"""A function of obstore, the store and a deadline."""

Version = tuple[str, int]
"""An ETag and a size."""
Known = Callable[..., Any]

LOGIN = {
    "s": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_REGION; if public "
    "AWS_SKIP_SIGNATURE=true.",
    "g": "Set GOOGLE_APPLICATION_CREDENTIALS or run `gcloud auth application-default login`; if public "
    "GOOGLE_SKIP_SIGNATURE=true.",
    "a": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login` and "
    "set AZURE_USE_AZURE_CLI=true; if public AZURE_SKIP_SIGNATURE=true.",
}
"""What to set, by the first letter of a scheme."""
ENDPOINTS = {
    "s": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "g": ("GOOGLE_BASE_URL",),
    "a": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def place(url: str) -> tuple[str, str]:
    """Return the address of a bucket, and a key, prefix or glob in it."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    bucket, _, key = rest.partition("/")
    key = key.removesuffix("/")
    form = "abfss://container@account.dfs.core.windows.net" if scheme[0] == "a" else f"{scheme}://bucket"  # fmt: skip
    login = "@" in bucket and not scheme.startswith("abfs")
    if not bucket or login or re.search(r"[\s:\\\0]", bucket) or (key and not sound(key)):
        raise ConfigError(f"{scheme}://…: bucket or path does not fit; needs the form {form}/path")
    return f"{scheme}://{bucket}", key


class Bucket:
    """A bucket, or a prefix in one. Its content may change."""

    def __init__(self, network: Network, root: str, known: Known | None = None) -> None:
        """`known` keeps listings."""
        self._network, self._root, self._known = network, root, known
        self.prefix = f"{root}/"
        self._lock = threading.Lock()
        self._opened: Any = None

    def call(self, name: str, function: Call[T], **retry: Any) -> T:
        """Return what a function of obstore, the store and a deadline returns, within the budget.

        Raise FileNotFoundError if there is no such file, bucket or range.
        """
        attempt = partial(self._try, f"{self.prefix}{name}", function)
        return self._network.retry(f"{self.prefix}{name}", attempt, **retry)

    def _try(self, where: str, function: Call[T], deadline: Deadline) -> T:
        obstore = _obstore(where)
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
        self._network.stats.add(requests=1)
        try:
            return function(obstore, self._opened, deadline)
        except (FileNotFoundError, obstore.exceptions.BaseError) as error:
            failed = _explained(error, where)
        raise failed  # without the original as its context, which quotes secrets

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        """Return the files whose keys begin with a folder's."""

        def list_all(obstore: Any, store: Any, deadline: Deadline) -> list[Entry]:
            found, prefix = [], folder or None
            pages = obstore.list(store, prefix)
            if not recursive:
                pages = [obstore.list_with_delimiter(store, prefix)["objects"]]
            for page in pages:
                deadline.timeout_s()
                # Empty objects stand for folders.
                found += [_entry(meta) for meta in page if meta["size"]]
            return found

        try:
            return self._kept([f"{self.prefix}{folder}", recursive], folder, list_all)
        except FileNotFoundError:
            raise SourceError(f"{self._root} does not exist.") from None

    def one(self, key: str) -> Entry | None:
        """Return a single file, if it exists."""

        def head(obstore: Any, store: Any, _: Deadline) -> list[Entry]:
            return [_entry(obstore.head(store, key))]

        try:
            return self._kept([f"{self.prefix}{key}"], key, head)[0]
        except FileNotFoundError:
            return None

    def _kept(self, key: list[Any], name: str, function: Callable[..., list[Entry]]) -> list[Entry]:
        assert self._known is not None
        key = [*key, _endpoint(self._root)]
        make = partial(self.call, name, function)
        return [Entry(*row) for row in self._known("listings", key, make, moving=True)]

    def read_into(self, key: str, start: int, view: memoryview, deadline: Deadline) -> Version:
        """Fill a buffer from a file, and return the file's ETag and size."""
        began, at = time.perf_counter(), 0

        def read(obstore: Any, store: Any, deadline: Deadline) -> Any:
            nonlocal at
            result = obstore.get(store, key, options={"range": (start, start + len(view))})
            for part in result.stream(min_chunk_size=1):
                deadline.timeout_s()
                deadline.received(len(part))
                if at + len(part) > len(view):
                    raise RequestError("long", f"more than {len(view)} bytes came")
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

    def _open(self) -> Any:
        from obstore.store import from_url

        limits, url = self._network.limits, self._root
        options: Any = {
            "connect_timeout": timedelta(seconds=limits.connect_timeout),
            "timeout": timedelta(seconds=limits.request_timeout),
            "read_timeout": timedelta(seconds=limits.stall_timeout),
            "allow_http": _endpoint(url).startswith("http://"),
            "user_agent": "penstock",
        }
        more: dict[str, Any] = _s3_credentials() if url[0] == "s" else {}
        try:
            return from_url(url, client_options=options, retry_config={"max_retries": 0}, **more)
        except Exception as error:  # obstore has an exception for each missing setting
            raise ConfigError(f"{url}: {_clean(str(error))}. {LOGIN[url[0]]}") from None


def _obstore(where: str) -> Any:
    try:
        importlib.import_module("obstore.exceptions")
        return importlib.import_module("obstore")
    except ImportError:
        needed_for = f"reading {where.partition('://')[0]}://"
        raise missing_extra("obstore", needed_for, "buckets") from None


def _entry(meta: Any) -> Entry:
    # Azure quotes ETags in answers and not in listings.
    return Entry(meta["path"], meta["size"], plain_etag(meta["e_tag"] or ""))


# Credentials


def _endpoint(root: str) -> str:
    found = environment()
    return next((found[name] for name in ENDPOINTS[root[0]] if found.get(name)), "")


def _s3_credentials() -> dict[str, Any]:
    """Return nothing if keys are in the environment, else the credentials of boto3 if installed.

    boto3 knows profiles, SSO and the roles of machines. Without any, requests are not signed:
    public buckets can be read, and others refuse at once.
    """
    given = environment().get("AWS_ACCESS_KEY_ID") or environment().get("AWS_SKIP_SIGNATURE")
    if given or importlib.util.find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # boto3 has none
        return {"skip_signature": True}


# Errors


def _explained(error: Exception, where: str) -> Exception:
    """Return one of obstore's exceptions as ours, without the secrets in its text."""
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
    """Return the first part of a message, its addresses without logins and queries."""
    said = " ".join(text.partition("\n\nDebug source")[0].split())
    return re.sub(r"(?<=//)[^/\s@]*@|\?\S*", "", said)[:240].rstrip(". ")
