"""Token, signed query and login appear in no log, no exception, no state, no count and no file, whatever goes wrong."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import PenstockError
from penstock.errors import SourceError
from tests.contracts import take
from tests.faults.serving import (
    CHOSEN,
    IMPATIENT,
    QUICK,
    content,
    dataset,
    documents,
    loader_of,
    parquet,
)
from tests.servers import Fault, FileServer, HubServer

TOKEN = "hf_tOkEnThAtNoBoDyMaYsEe"
USER, PASSWORD = "somebody", "pa55w0rd-of-somebody"
QUERY = "X-Amz-Signature=0123456789abcdef-of-a-signed-query"
SECRETS = (
    TOKEN, PASSWORD, QUERY, "0123456789abcdef-of", "Signature=", "Authorization",
    base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode(),
)  # fmt: skip


class Found:
    """Everything that a run leaves behind, as text."""

    def __init__(self, cache: Path, logs: pytest.LogCaptureFixture) -> None:
        self._cache = cache
        self._logs = logs
        self._parts: list[str] = []

    def add(self, *things: Any) -> None:
        for thing in things:
            self._parts += [repr(thing), str(thing)]

    def add_error(self, error: BaseException) -> None:
        """An exception with everything that hangs on it: notes, causes, contexts also where they are not shown."""
        self._parts.append("".join(traceback.format_exception(error)))
        seen: set[int] = set()
        waiting: list[BaseException | None] = [error]
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            self.add(one, one.args, getattr(one, "__notes__", []), vars(one))
            waiting += [one.__cause__, one.__context__, getattr(one, "final", None)]

    def check(self, *more: str) -> None:
        formatter = logging.Formatter("%(message)s %(pathname)s %(args)s")
        logged = [formatter.format(record) for record in self._logs.records]
        everything = "\n".join([*self._parts, *logged])
        assert everything
        for secret in (*SECRETS, *more):
            assert secret not in everything
        files = [path for path in self._cache.rglob("*") if path.is_file()]
        assert files, "something is kept"
        for path in files:
            data = path.read_bytes()
            for secret in (*SECRETS, *more):
                assert secret.encode() not in data, path
                assert secret not in str(path)


@pytest.fixture
def found(outside: Path, caplog: pytest.LogCaptureFixture) -> Found:
    caplog.set_level(logging.DEBUG)
    return Found(outside, caplog)


@pytest.fixture(scope="module")
def private_hub() -> Iterator[HubServer]:
    with HubServer(page_size=4) as server:
        server.add("org/private", {"a.parquet": content()[CHOSEN]}, private=True, tokens=(TOKEN,))
        yield server


@pytest.fixture
def private(private_hub: HubServer, outside: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    monkeypatch.setenv("HF_ENDPOINT", private_hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    private_hub.clear_faults()
    private_hub.clear_log()
    return private_hub


def watch(
    found: Found,
    url: Any,
    how: dict[str, Any] | None = None,
    then: Callable[[], None] | None = None,
    **data: Any,
) -> BaseException | None:
    """Run to the end, with everything kept that it says of itself on the way. `then` is called every few batches."""
    try:
        described = dataset(url, cache=True, **data)
        found.add(
            described,
            described.files,
            described.remote_config,
            described.data_id(),
            vars(described),
        )
        with loader_of(described, **how or {}) as loader:
            try:
                while take(loader, 5):
                    found.add(loader, json.dumps(loader.state_dict()), loader.stats())
                    if then is not None:
                        then()
            finally:
                found.add(loader.stats())
    except PenstockError as error:
        found.add_error(error)
        return error
    return None


TOLD = {"X-Error-Message": f"Bearer {TOKEN}", "Location": f"/?{QUERY}"}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("status", {"code": 503, "headers": TOLD, "body": f"{TOKEN} {QUERY}".encode()}), ("status", {"code": 403}),
    ("status", {"code": 404, "headers": TOLD}), ("reset", {}), ("garbage", {}), ("no_range", {}), ("wrong_range", {}),
    ("etag", {}), ("redirect", {"to": f"http://{USER}:{PASSWORD}@127.0.0.1/?{QUERY}"}),
    ("redirect", {"to": f"ftp://x/?{QUERY}"}), ("redirect", {"to": f"http://127.0.0.1:1/?{QUERY}"}),
    ("redirect", {"to": f"http://127.0.0.1:{PASSWORD}/?{QUERY}"}),
    ("garbage", {"data": f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/?{QUERY}\0\r\n\r\n".encode()}),
    ("garbage", {"data": f"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n X {QUERY}\0\r\n\r\n".encode()}),
]  # fmt: skip


@pytest.mark.parametrize("port", ["hub", "cdn"])
def test_faults_that_pass_show_nothing(private: HubServer, found: Found, port: str) -> None:
    for kind, details in KINDS:
        if details.get("code") in (403, 404):
            continue  # said thrice, these are final
        private.fault(Fault(kind, port=port, path="*a.parquet", **details))
    limits = replace(QUICK, stall_timeout=0.2, backoff=0.0)
    how = {"n_workers": 1, "prefetch_size": 1}
    calls = itertools.count()

    def expire() -> None:
        if next(calls) % 10 == 0:  # not so often that new addresses expire before they are used
            private.expire_signatures()

    assert watch(found, "hf://datasets/org/private", how, expire, remote=limits) is None
    assert sum(request.fault != "" for request in private.log) > 3
    found.check(*signatures(private))


@pytest.mark.parametrize("port", ["hub", "cdn"])
@pytest.mark.parametrize(
    ("kind", "details"), KINDS, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(KINDS)]
)
def test_faults_that_stay_show_nothing(
    private: HubServer, found: Found, port: str, kind: str, details: dict[str, Any]
) -> None:
    skip = 1 if port == "cdn" else 0
    private.fault(Fault(kind, port=port, path="*a.parquet", times=None, skip=skip, **details))
    limits = replace(IMPATIENT, retry_budget=0.15, backoff=0.0)
    error = watch(found, "hf://datasets/org/private", remote=limits)
    if kind not in ("etag", "size") or port == "cdn":
        struck = any(request.fault for request in private.log)
        # A redirect has no body and no range to be wrong; and on a busy machine the time may be over before a fault strikes.
        assert (error is not None) == struck or "not done after" in str(error)
    found.check(*signatures(private))


def signatures(hub: HubServer) -> list[str]:
    """All signatures that the Hub gave out."""
    queries = [request.query for request in hub.log if request.port == "cdn"]
    return sorted({query.rpartition("Signature=")[2] for query in queries} - {""})


def test_an_expired_address_and_a_worker_process_show_nothing(
    private: HubServer, found: Found
) -> None:
    private.fault(Fault("status", port="cdn", code=403, skip=2, times=None))
    how = {"workers": "process", "n_workers": 1}
    assert watch(found, "hf://datasets/org/private", how, remote=IMPATIENT) is not None
    found.check(*signatures(private))


@pytest.mark.parametrize("token", [TOKEN + "-wrong", TOKEN + "\x01"])
def test_a_token_that_is_refused_is_not_shown(
    private: HubServer, found: Found, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    (Path(found._cache)).mkdir(parents=True, exist_ok=True)
    (Path(found._cache) / "something").write_text("kept")
    error = watch(found, "hf://datasets/org/private", remote=IMPATIENT)
    assert error is not None
    assert "org/private" in str(error)
    found.check()


WEB: list[tuple[str, dict[str, Any]]] = [
    ("", {}), ("status", {"code": 503}), ("status", {"code": 403}), ("reset", {}), ("no_range", {}), ("etag", {}),
    ("redirect", {"to": lambda path: f"{path}?{QUERY}&again"}), ("garbage", {}),
]  # fmt: skip


@pytest.mark.parametrize("head", [True, False], ids=["listing", "reading"])
@pytest.mark.parametrize(("kind", "details"), WEB, ids=[f"{n}-{k}" for n, (k, _) in enumerate(WEB)])
def test_a_login_and_a_signed_query_of_an_address_are_not_shown(
    outside: Path, found: Found, kind: str, details: dict[str, Any], head: bool
) -> None:
    with FileServer({"a.parquet": content()[CHOSEN], "b.parquet": content()[CHOSEN]}) as server:
        urls = [
            server.url_of("a.parquet").replace("//", f"//{USER}:{PASSWORD}@") + f"?{QUERY}",
            server.url_of("b.parquet") + f"?{QUERY}&other#fragment",
        ]
        if kind:
            server.fault(Fault(kind, times=None, skip=0 if head else 2, **details))
        limits = replace(IMPATIENT, retry_budget=0.15, metadata_budget=0.15, backoff=0.0)
        error = watch(found, urls, remote=limits)
        sent = [request for request in server.log if QUERY in request.query]
        assert sent, "the server gets what belongs to it"
        if error is not None:
            assert server.url in str(error)
            outside.mkdir(parents=True, exist_ok=True)
            (outside / "something").write_text("kept")
        else:
            # An ETag that was odd from the beginning on is just its ETag.
            assert not kind or (head and kind in ("no_range", "etag"))
        found.check()


# What servers repeat, addresses that cannot be used, keys of buckets, commands


BRIEF = replace(IMPATIENT, retry_budget=0.1, metadata_budget=0.1, stall_timeout=0.05, backoff=0.005)


@pytest.fixture(autouse=True)
def something_kept(outside: Path) -> None:
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "something").write_text("kept")


def test_a_file_that_changed_and_one_that_is_unknown_offline_are_named_without_secrets(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileServer(
        {"a.parquet": parquet(documents()), "b.parquet": parquet(documents())}
    ) as files:
        base = files.url.replace("//", f"//{USER}:{PASSWORD}@")
        urls = [f"{base}/{name}.parquet?{QUERY}" for name in "ab"]
        with loader_of(dataset(urls)) as loader:
            take(loader, 2)
            state = loader.state_dict()
        found.add(json.dumps(state))
        files.put("b.parquet", parquet(documents()[1:]))
        with (
            loader_of(dataset(urls)) as loader,
            pytest.raises(SourceError, match=r"b\.parquet") as raised,
        ):
            loader.load_state_dict(state)
        found.add_error(raised.value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        error = watch(found, f"{base}/c.parquet?{QUERY}")
        assert error is not None
        assert "c.parquet" in str(error)
    found.check()


@pytest.mark.parametrize(
    "url",
    [
        "http://{login}@host:port/a.parquet?{query}", "http://{login}@[::1/a.parquet", "https://{login}@host/?{query}",
        "https://{login}@host/a.bin?{query}", "HTTPS://{login}@host/a b.parquet", "ftp://{login}@host/a.parquet",
        "s3://{login}@bucket/a.parquet",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_used_is_not_shown(found: Found, url: str) -> None:
    assert watch(found, url.format(login=f"{USER}:{PASSWORD}", query=QUERY)) is not None
    found.check()


@pytest.mark.parametrize(
    ("kind", "details"),
    [("status", {}), ("status", {"code": 403}), ("reset", {}), ("redirect", {"to": f"ftp://h/?sig={PASSWORD}"})],
)  # fmt: skip
def test_the_keys_of_a_bucket_are_not_shown(
    found: Found, monkeypatch: pytest.MonkeyPatch, kind: str, details: dict[str, Any]
) -> None:
    pytest.importorskip("obstore")
    with FileServer({}) as server:
        server.fault(Fault(kind, method="*", times=None, **details))
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2024&sig={PASSWORD}")
        assert watch(found, "az://texts/a.parquet", remote=BRIEF) is not None
        assert any(f"sig={PASSWORD}" in request.query for request in server.log)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
        assert watch(found, "s3://texts/a.parquet", remote=BRIEF) is not None
        assert any(request.headers.get("x-amz-security-token") == TOKEN for request in server.log)
    found.check("sig=")


@pytest.mark.parametrize("fails", [False, True])
def test_preparing_reports_no_secret(found: Found, tmp_path: Path, fails: bool) -> None:
    with FileServer({"a.parquet": content()[CHOSEN]}) as files:
        files.fault(Fault("status", skip=2, times=None if fails else 4))
        url = files.url_of("a.parquet").replace("//", f"//{USER}:{PASSWORD}@") + f"?{QUERY}"
        remote = {"retry_budget": 0.2 if fails else 20, "backoff": 0.01}
        code = f"from penstock.prepare import prepare; print(prepare({url!r}, tokenizer='byte', out='{tmp_path}/out', remote={remote!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
    assert (done.returncode != 0) == fails, done.stderr
    text = done.stderr.replace(code, "")  # a traceback may show the caller's own line
    found.add(done.stdout, text)
    found.check()
    for path in (tmp_path / "out").rglob("*.json"):
        found.add(path.read_text())
    found.check()
