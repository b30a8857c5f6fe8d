"""More places where a secret could be seen: what servers repeat, addresses that are none, keys of buckets, commands."""

# ruff: noqa: F811  (fixtures of another file)

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SourceError
from tests.contracts import take
from tests.faults.serving import CHOSEN, IMPATIENT, content, dataset, documents, loader_of, parquet
from tests.faults.test_secrets import (  # noqa: F401
    PASSWORD,
    QUERY,
    TOKEN,
    USER,
    Found,
    found,
    private,
    private_hub,
    signatures,
    watch,
)
from tests.servers import Fault, FileServer

BRIEF = replace(IMPATIENT, retry_budget=0.1, metadata_budget=0.1, stall_timeout=0.05, backoff=0.005)


@pytest.fixture(autouse=True)
def something_kept(outside: Path) -> None:
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "something").write_text("kept")


def test_a_file_that_changed_and_one_that_is_unknown_offline_are_named_without_secrets(
    found: Found,
    monkeypatch: pytest.MonkeyPatch,
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
