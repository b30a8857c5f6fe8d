"""Files in buckets: s3://, gs://, az:// and abfss://, through `obstore`.

obstore's own retries are off: `Network.retry` retries, counts and gives up. Its timeouts bound
whatever blocks, and the deadline is checked between the parts of a body. Credentials are those of
the user's environment.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.config import environment
from penstock.errors import (
    ConfigError,
    SourceError,
    missing_extra,
)
from penstock.options import RemoteOptions
from penstock.read.http import RETRY, Deadline, RequestError, plain_etag
from penstock.read.hub import sound
from penstock.read.listing import Entry
from penstock.types import FileRef

if TYPE_CHECKING:
    from penstock.read.remote_files import Network

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
    """A bucket. Its content may change."""

    def __init__(
        self, network: Network, root: str, known: Callable[..., Any] | None = None
    ) -> None:
        """`known` keeps listings."""
        self._network, self._root, self._known = network, root, known
        self.prefix = f"{root}/"
        self._lock = threading.Lock()
        self._opened: Any = None

    def below(self, folder: str, recursive: bool) -> list[Entry]:
        """Return the files whose keys begin with a folder's."""
        where = f"{self.prefix}{folder}"

        def attempt(deadline: Deadline) -> list[Entry]:
            self._network.stats.add(requests=1)
            with _explained(where):
                store, prefix = self._store(), folder or None
                pages = _obstore(where).list(store, prefix) if recursive else [
                    _obstore(where).list_with_delimiter(store, prefix)["objects"]
                ]  # fmt: skip
                found: list[Entry] = []
                for page in pages:
                    deadline.timeout_s()
                    # Empty objects stand for folders.
                    found += [_entry(meta) for meta in page if meta["size"]]
                return found

        def make() -> list[Entry]:
            try:
                return self._network.retry(where, attempt)
            except _Missing:
                raise SourceError(f"{self._root} does not exist.") from None

        return self._kept([where, recursive], make)

    def one(self, key: str) -> Entry | None:
        """Return a single file, if it exists."""

        def make() -> list[Entry]:
            try:
                return [self._network.retry(f"{self.prefix}{key}", lambda _: self._head(key))]
            except _Missing:
                return []

        return next(iter(self._kept([f"{self.prefix}{key}"], make)), None)

    def _kept(self, key: list[Any], make: Callable[[], list[Entry]]) -> list[Entry]:
        assert self._known is not None
        key = [*key, _endpoint(self._root)]
        return [Entry(*row) for row in self._known("listings", key, make, moving=True)]

    def _head(self, key: str) -> Entry:
        self._network.stats.add(requests=1)
        with _explained(f"{self.prefix}{key}"):
            return _entry(_obstore(self._root).head(self._store(), key))

    def read_into(
        self,
        file: FileRef,
        start: int,
        view: memoryview,
        deadline: Deadline,
        check: Callable[[str, int], None],
    ) -> None:
        """Fill a buffer from a file. `check` raises if its ETag and size are not those listed."""
        key = place(file.path)[1]
        stats, began = self._network.stats, time.perf_counter()
        stats.add(requests=1)
        at = 0
        try:
            with _explained(file.path):
                wanted = {"range": (start, start + len(view))}
                result = _obstore(self._root).get(self._store(), key, options=wanted)
                for part in result.stream(min_chunk_size=1):
                    deadline.timeout_s()
                    deadline.received(len(part))
                    if at + len(part) > len(view):
                        raise RequestError("long", f"more than {len(view)} bytes came")
                    view[at : at + len(part)] = memoryview(part)
                    at += len(part)
            if at != len(view):
                raise RequestError("short", f"{at} bytes instead of {len(view)}")
        except _Missing:
            text = f"{file.path} is gone or shorter. Restore it, or start a new run."
            raise RequestError("status_404", SourceError(text)) from None
        finally:
            stats.add(bytes=at, body_s=time.perf_counter() - began)
        check(plain_etag(result.meta["e_tag"] or ""), result.meta["size"])

    def _store(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = open_store(self._root, self._network.limits)
            return self._opened


def open_store(url: str, limits: RemoteOptions, retries: int = 0) -> Any:
    """Return obstore's store for a bucket, or for a prefix in it."""
    _obstore(url)
    from obstore.store import from_url

    opened: Any = from_url
    login = _s3_credentials() if url[0] == "s" else {}
    timeouts: Any = {
        "connect_timeout": timedelta(seconds=limits.connect_timeout),
        "timeout": timedelta(seconds=limits.request_timeout),
        "read_timeout": timedelta(seconds=limits.stall_timeout),
    }
    http = _endpoint(url).startswith("http://")
    options = {**timeouts, "allow_http": http, "user_agent": "penstock"}
    try:
        return opened(url, client_options=options, retry_config={"max_retries": retries}, **login)
    except Exception as error:  # obstore has an exception for each missing setting
        raise ConfigError(f"{url}: {_clean(str(error))}. {LOGIN[url[0]]}") from None


def _obstore(root: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise missing_extra(
            "obstore", f"reading {root.partition('://')[0]}://", "buckets"
        ) from None


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


class _Missing(Exception):
    """There is no such file, bucket or range."""


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Raise obstore's exceptions as `RequestError`, without the secrets in their text."""
    _obstore(where)
    from obstore import exceptions

    failed: Exception
    try:
        yield
        return
    except FileNotFoundError:
        failed = _Missing(where)
    except exceptions.BaseError as error:
        failed = _request_error(error, where)
    raise failed


def _request_error(error: Exception, where: str) -> Exception:
    from obstore import exceptions

    said = str(error).partition("\n\nDebug source")[0]
    status = re.search(r"status code: (\d{3})", said)
    number = int(status[1]) if status else 0
    denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    if number in (404, 416):
        return _Missing(where)
    if number >= 500 or number in RETRY or not (status or denied or "configured region" in said):
        return RequestError(f"status_{number}" if status else "bucket", _clean(said))
    text = f"{where}: access is refused{_code(said)}. {LOGIN[where[0]]}"
    return RequestError("denied", SourceError(text))


def _code(text: str) -> str:
    """Return the code that a service gives with a refusal."""
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    return f" ({code[1]})" if code else ""


def _clean(text: str) -> str:
    """Return the first part of a message, its addresses without logins and queries."""
    said = " ".join(text.partition("\n\nDebug source")[0].split())
    said = re.sub(r"//[^/\s@]*@", "//", said)
    return re.sub(r"\?\S*", "", said)[:240].rstrip(". ")


def _entry(meta: Any) -> Entry:
    # Azure quotes ETags in answers and not in listings.
    return Entry(meta["path"], meta["size"], "".join(plain_etag(meta["e_tag"] or "").split()))
