"""Files in buckets: s3://, gs://, az:// and abfss://, through `obstore`.

In:    an address, or a `FileRef` and a range.
Out:   sizes and ETags; bytes, of exactly the length asked for.
Where: listing blocks the calling thread; reading runs on fetch threads, many at once.
State: one store for each bucket, with its connections and credentials, behind a lock.

obstore's own retries are off, because one loop tries again, counts and gives up, and it is not here. Its
timeouts bound whatever blocks; reads also end by their `Patience`, and when cancelled. Credentials are
those that users have in their environment: see `bucket_login`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    AccessDenied,
    ConfigError,
    MissingExtra,
    NoData,
    RemoteError,
    SourceChanged,
)
from penstock.read.attempt import Answer, Fault, Patience
from penstock.read.bucket_login import LOGIN, azure_account, endpoint_of, s3_credentials
from penstock.read.bucket_loop import BucketLoop
from penstock.read.hub import Entry
from penstock.read.retry import AGAIN, Client
from penstock.types import FileRef

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PAGE = 1000
REASONS = {
    "non-partial response": "no_range", "Requested ": "wrong_range", "dns error": "dns",
    "ConnectionRefused": "refused", "ConnectionReset": "reset", "TimedOut": "timeout", "kind: Timeout": "timeout",
    "IncompleteMessage": "cut", "kind: Interrupted": "cut", "redirect": "redirect", "Header": "protocol",
    "hyper": "protocol",
}  # fmt: skip
"""Which words of obstore's errors stand for which reason; the first that fits counts."""


def place(url: str) -> tuple[str, str]:
    """The address of a bucket and a key, prefix or glob in it; or an error that shows how to write one."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    bucket, _, key = rest.partition("/")
    form = (
        "abfss://container@account.dfs.core.windows.net/path"
        if scheme[:1] == "a"
        else f"{scheme}://bucket/path"
    )
    if (
        not bucket
        or ("@" in bucket and not scheme.startswith("abfs"))
        or re.search(r"[\s:\\\0]", bucket)
    ):
        raise ConfigError(
            f"{scheme}://…: the name of its bucket does not fit; needs the form {form}"
        )
    key = key.removesuffix("/")
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/") if key):
        raise ConfigError(f"{url}: {key!r} is no path in a bucket; needs the form {form}")
    return f"{scheme}://{bucket}", key


class Buckets:
    """The buckets of one run."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._stores: dict[str, ObjectStore] = {}

    # Listing

    def below(self, root: str, folder: str, *, recursive: bool) -> list[Entry]:
        """The files whose keys begin with a folder's."""
        obstore = _obstore(root)
        where = f"{root}/{folder}" if folder else root
        found: dict[str, Entry] = {}

        def level(_: Patience) -> bool:
            with _faults(where):
                self._client.tally.add(requests=1)
                page = obstore.list_with_delimiter(self._store(root), folder or None)["objects"]
                found.update((meta["path"], _entry(meta)) for meta in page)
            return True

        def pages(_: Patience) -> bool:
            """Whether this was all; not if there were some and then a fault."""
            last = max(found, default=None)
            try:
                with _faults(where):
                    for page in obstore.list(
                        self._store(root), folder or None, offset=last, chunk_size=PAGE
                    ):
                        self._client.tally.add(requests=1)
                        found.update((meta["path"], _entry(meta)) for meta in page)
            except Fault as fault:
                ordered = list(found) == sorted(found)
                if not ordered:
                    found.clear()  # where a server has no order, there is no going on from the last
                if fault.final is not None or not ordered or max(found, default=None) == last:
                    raise
                self._client.tally.add(fault=fault.reason)
                return False
            return True

        attempt: Callable[[Patience], bool] = pages if recursive else level
        try:
            while not self._client.keep_trying(where, self._client.limits.metadata_budget, attempt):
                pass  # some came, and then a fault: what is left has a budget of its own
        except _Missing:
            raise NoData(
                f"{root} does not exist at {self.endpoint(root) or 'its provider'}."
            ) from None
        # A provider's web page makes an empty object to stand for a folder.
        folders = {folder}
        for key in found:
            while (key := key.rpartition("/")[0]) not in folders and key:
                folders.add(key)
        return [entry for key, entry in found.items() if entry.size or key not in folders]

    def one(self, root: str, key: str) -> Entry | None:
        """A single file, if it is there."""
        budget = self._client.limits.metadata_budget
        try:
            return self._client.keep_trying(
                f"{root}/{key}", budget, lambda _: self._head(root, key)
            )
        except _Missing:
            return None

    def _head(self, root: str, key: str) -> Entry:
        obstore = _obstore(root)
        self._client.tally.add(requests=1)
        with _faults(f"{root}/{key}"):
            return _entry(obstore.head(self._store(root), key))

    # Reading

    def read_range(self, file: FileRef, start: int, length: int, patience: Patience) -> Answer:
        """A range of a file: all of it, or a fault."""
        root, key = place(file.path)
        data = _Filling(length, patience)
        what = _obstore(root), self._store(root), key, start, data
        tally, begun = self._client.tally, time.perf_counter()
        tally.add(requests=1)
        try:
            with _faults(file.path):
                result = _run(_read(*what), patience) or _read_blocking(*what)
            if data.at != length:
                raise Fault("short", f"{data.at} bytes instead of {length}")
        except _Missing:
            text = f"{file.path} is gone. Restore it, or start a new run."
            raise Fault("status_404", text, final=SourceChanged(text)) from None
        except Fault as fault:
            if fault.reason in ("status_416", "wrong_range", "short"):
                self._look_closer(file, root, key)
            if fault.reason == "expired":
                with self._lock:
                    self._stores.pop(root, None)  # the next one has new credentials
            raise
        tally.add(bytes=length)
        tally.exchange(body_s=time.perf_counter() - begun)  # obstore does not tell its parts apart
        return Answer(data.buffer, _plain(result.meta["e_tag"]), result.meta["size"])

    def _look_closer(self, file: FileRef, root: str, key: str) -> None:
        """A range that cannot be had: the file may have become shorter since it was listed."""
        try:
            now = self._head(root, key)
        except _Missing:
            return  # the next attempt will find it gone
        if now.size != file.size or (file.etag and now.etag != file.etag):
            text = (
                f"{file.path} changed: it was {file.size} bytes long with the ETag {file.etag or 'none'}, it is "
                f"{now.size} with {now.etag or 'none'}. Restore the file, or start a new run."
            )
            raise Fault("size", text, final=SourceChanged(text))

    # Stores

    def endpoint(self, root: str) -> str:
        """Which service a bucket's name means here: the same name elsewhere is another bucket."""
        return re.sub(r"//[^/@]*@", "//", endpoint_of(root))

    def _store(self, root: str) -> ObjectStore:
        with self._lock:
            if root not in self._stores:
                self._stores[root] = self._open(root)
            return self._stores[root]

    def _open(self, root: str) -> ObjectStore:
        from obstore.store import AzureStore, GCSStore, S3Store

        limits = self._client.limits
        scheme, _, bucket = root.partition("://")
        common: dict[str, Any] = {
            "client_options": {
                "connect_timeout": timedelta(seconds=limits.connect_timeout),
                "timeout": timedelta(seconds=limits.request_timeout),
                "read_timeout": timedelta(seconds=limits.stall_timeout),
                "allow_http": endpoint_of(root).startswith("http://"),
                "user_agent": "penstock",
            },
            "retry_config": {"max_retries": 0},
        }
        try:
            if scheme in ("s3", "s3a"):
                return S3Store(bucket, **common, **s3_credentials())
            if scheme == "gs":
                return GCSStore(bucket, **common)
            account = azure_account()
            if "@" in bucket:
                account.pop("account_name", None)  # the address has one
            return AzureStore.from_url(root, **common, **account)
        except Exception as error:  # obstore has its own exception for each missing setting
            raise ConfigError(f"{root}: {_clean(str(error))}. {LOGIN[root[0]]}") from None


class _Filling:
    """A buffer, how far it is filled, and how long that may take."""

    def __init__(self, length: int, patience: Patience) -> None:
        self.buffer = bytearray(length)
        self.at = 0
        self.patience = patience

    def add(self, part: Any) -> None:
        end = self.at + len(part)
        if end > len(self.buffer):
            raise Fault("long", f"more than the {len(self.buffer)} bytes asked for came")
        self.buffer[self.at : end] = part
        self.at = end
        self.patience.moved(len(part))
        if self.patience.cancelled:
            raise Fault("cancelled", "nobody needs it any more")


async def _read(obstore: Any, store: ObjectStore, key: str, start: int, data: _Filling) -> Any:
    async with asyncio.timeout(data.patience.wait_s()):
        result = await obstore.get_async(
            store, key, options={"range": (start, start + len(data.buffer))}
        )
    # Bytes are taken as they come, some hundred kilobytes at once on a fast line: a drip is seen.
    parts = aiter(result.stream(min_chunk_size=1))
    while True:
        try:
            async with asyncio.timeout(data.patience.wait_s()):
                part = await anext(parts)
        except StopAsyncIteration:
            return result
        data.add(part)


def _read_blocking(obstore: Any, store: ObjectStore, key: str, start: int, data: _Filling) -> Any:
    result = obstore.get(store, key, options={"range": (start, start + len(data.buffer))})
    for part in result.stream(min_chunk_size=1):
        data.add(part)
    return result


def _run(reading: Any, patience: Patience) -> Any:
    """What a coroutine gives, unless it is cancelled meanwhile; None in a thread that runs another loop."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        reading.close()
        return None
    try:
        return BucketLoop().run(reading, patience.when_cancelled)
    except TimeoutError:
        raise patience.ran_out() from None
    except asyncio.CancelledError:
        raise Fault("cancelled", "nobody needs it any more") from None
    finally:
        patience.when_cancelled(None)


def _obstore(root: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise MissingExtra("obstore", f"reading {root.partition('://')[0]}://", "buckets") from None


# Faults


class _Missing(Exception):
    """There is no such file or bucket."""


@contextlib.contextmanager
def _faults(where: str) -> Iterator[None]:
    """obstore's exceptions as faults, without the secrets that an address in their text may hold."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise _Missing(where) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        text = f"{where}: access is refused{_said(str(error))}. {LOGIN[where[0]]}"
        raise Fault("denied", text, final=AccessDenied(text)) from None
    except exceptions.BaseError as error:
        if "status code: 404" in str(error):  # a bucket that does not exist
            raise _Missing(where) from None
        raise _fault(str(error), where) from None


def _fault(text: str, where: str) -> Fault:
    said, _, inner = text.partition("\n\nDebug source")
    status = re.search(r"non-2xx status code: (\d{3})", said)
    if status is not None:
        number = int(status[1])
        detail = f"the server answered {number}{_said(said)}"
        if "<Code>Expired" in said:
            return Fault("expired", detail)
        if 400 <= number < 500 and number not in AGAIN and number != 416 and "Timeout" not in said:
            advice = (
                "Is AWS_REGION the region of the bucket?"
                if where[0] == "s" and number == 400
                else LOGIN[where[0]]
            )
            kind = AccessDenied if number in (401, 403) else RemoteError
            return Fault(f"status_{number}", detail, final=kind(f"{where}: {detail}. {advice}"))
        return Fault(f"status_{number}", detail)
    if "incorrectly configured region" in said:
        detail = f"{where}: the bucket is in another region. Set AWS_REGION to its region."
        return Fault("region", detail, final=RemoteError(detail))
    reason = next(
        (reason for mark, reason in REASONS.items() if mark in said or mark in inner), "bucket"
    )
    return Fault(reason, _clean(said))


def _said(text: str) -> str:
    """The code that a service gives with a refusal."""
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    return f" ({code[1]})" if code else ""


def _clean(text: str) -> str:
    """The first part of a message, its addresses without logins and queries."""
    said = " ".join(text.partition("\n\nDebug source")[0].split())
    said = re.sub(r"//[^/\s@]*@", "//", said)
    return re.sub(r"\?\S*", "", said)[:240].rstrip(". ")


def _entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], _plain(meta["e_tag"]))


def _plain(etag: str | None) -> str:
    """An ETag without its quotes: Azure gives them in answers and not in listings."""
    return "".join((etag or "").removeprefix("W/").strip('"').split())


__all__ = ["Buckets", "place"]
