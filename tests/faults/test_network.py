"""Faults of networks and servers: the stream is that of a local copy, or a typed error comes in time."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import PenstockError
from penstock.errors import RemoteError, SourceError
from tests.faults.serving import (
    CALM,
    CHOSEN,
    DEADLINE_S,
    FORMS,
    IMPATIENT,
    QUICK,
    Outcome,
    content,
    dataset,
    hf,
    loader_of,
    run,
)
from tests.servers import Fault, FileServer, HubServer

Expected = Callable[..., list[str]]

PLACES: dict[str, dict[str, Any]] = {
    "data": {"port": "cdn", "skip": 2},
    "resolve": {"port": "hub", "path": "*.parquet"},
    "revision": {"port": "hub", "path": "*/revision/*"},
    "tree": {"port": "hub", "path": "*/tree/*", "skip": 1},
    "card": {"port": "hub", "path": "*README.md"},
}
"""Where a fault may strike: in the middle of the data, where its address is asked for, and in all metadata."""
WHOLE = "hf://datasets/org/name"
"""The repository's default configuration: its card, its listing in pages, and one file."""


def survived(outcome: Outcome, ledger: list[str]) -> None:
    """The run went on as if nothing had happened."""
    if outcome.error is not None:
        raise outcome.error
    assert outcome.ledger == ledger
    assert outcome.seconds < DEADLINE_S


def failed(outcome: Outcome, kind: type[PenstockError], *words: str, reason: str = "") -> str:
    """The run ended in time with an error of this kind, which says these words, and why.

    On a machine that is very busy, the answer that would say why may come too late: that is a reason as well.
    """
    assert outcome.seconds < DEADLINE_S
    assert outcome.error is not None, "it did not fail"
    text = str(outcome.error)
    assert type(outcome.error) is kind, f"{type(outcome.error).__name__}: {text}"
    for word in words:
        assert word in text, text
    assert any(why in text for why in (reason, "(deadline", "(stall")), text
    return text


# Statuses


@pytest.mark.parametrize("place", PLACES)
def test_a_status_that_may_pass_is_tried_again(
    hub: HubServer, expected: Expected, place: str
) -> None:
    for code in (408, 429, 500, 502, 503, 504):
        hub.fault(Fault("status", code=code, **PLACES[place]))
    outcome = run(WHOLE, remote=replace(QUICK, backoff=0.0))
    survived(outcome, expected(CHOSEN))
    assert sum(request.fault == "status" for request in hub.log) == 6
    if place in ("data", "resolve"):
        assert {f"status_{code}" for code in (408, 429, 500, 502, 503, 504)} <= set(outcome.faults)


@pytest.mark.parametrize("place", PLACES)
def test_a_status_that_does_not_pass_is_an_error_that_lists_the_attempts(
    hub: HubServer, place: str
) -> None:
    hub.fault(Fault("status", code=503, times=None, **PLACES[place]))
    setting = "retry_budget" if place in ("data", "resolve") else "metadata_budget"
    text = failed(
        run(WHOLE, remote=IMPATIENT),
        RemoteError,
        "hf://datasets/org/name@",
        "status_503 ",
        f"RemoteOptions({setting}",
    )
    assert "attempts in" in text


def test_a_server_that_asks_to_wait_is_waited_for(hub: HubServer, expected: Expected) -> None:
    hub.fault(Fault("status", code=429, retry_after=1, **PLACES["data"]))
    outcome = run(WHOLE, remote=replace(CALM, retry_after_cap=5))
    survived(outcome, expected(CHOSEN))
    assert outcome.faults == {"status_429": 1}
    assert outcome.stats is not None
    assert 1000 <= outcome.stats.retry_wait_ms < 5000


@pytest.mark.parametrize("place", ["revision", "tree"])
def test_a_web_page_in_place_of_a_listing_is_asked_for_again_or_an_error(
    hub: HubServer, expected: Expected, place: str
) -> None:
    hub.fault(Fault("status", code=200, body=b"<html>", times=None, **PLACES[place]))
    failed(run(WHOLE), RemoteError, "org/name", "portal or proxy", reason="not a listing")
    hub.clear_faults()
    hub.clear_log()
    hub.fault(Fault("html", **PLACES[place]))
    hub.fault(Fault("status", code=200, body=b"<html>", **PLACES[place]))
    survived(run(WHOLE, remote=CALM), expected(CHOSEN))
    assert sum(request.fault != "" for request in hub.log) == 2


# Connections


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("silence", {}), ("stall", {"after": 70}), ("drip", {"after": -1}), ("drip", {"after": 60}),
    ("reset", {"after": -1}), ("reset", {"after": 50}), ("fin", {"after": -1}), ("fin", {"after": 50}),
    ("truncated_chunked", {"after": 40}), ("garbage", {}), ("huge_headers", {}),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_broken_connections_are_tried_again(hub: HubServer, expected: Expected, place: str) -> None:
    for kind, details in BROKEN:
        hub.fault(Fault(kind, **details, **PLACES[place]))
    outcome = run(WHOLE, remote=replace(QUICK, stall_timeout=0.2, backoff=0.0))
    survived(outcome, expected(CHOSEN))
    struck = [request.fault for request in hub.log if request.fault]
    bodiless = 5 if place == "resolve" else 0
    assert len(struck) == len(BROKEN) - bodiless, "a redirect has no body to break"


# Answers that are not what was asked for


@pytest.mark.parametrize(
    "kind", ["no_range", "wrong_range", "short", "long", "gzip", "html", "etag", "size"]
)
@pytest.mark.parametrize("where", ["hub", "files"])
def test_a_wrong_answer_is_noticed_and_asked_for_again(
    hub: HubServer, outside: Path, expected: Expected, kind: str, where: str
) -> None:
    with FileServer({"a.parquet": content()[CHOSEN]}) as files:
        server: HubServer | FileServer = hub if where == "hub" else files
        server.fault(Fault(kind, port="cdn" if where == "hub" else "files", skip=2))
        outcome = run(hf(CHOSEN) if where == "hub" else files.url_of("a.parquet"), remote=CALM)
        assert [r.fault for r in server.log if r.fault] == [kind]
    survived(outcome, expected(CHOSEN))
    assert outcome.faults == {{"gzip": "encoded", "short": "wrong_range"}.get(kind, kind): 1}


@pytest.mark.parametrize(
    ("kind", "error", "word"),
    [
        ("no_range", RemoteError, "does not answer requests for a range"), ("wrong_range", RemoteError, "wrong_range"),
        ("short", RemoteError, "wrong_range"), ("long", RemoteError, "long"), ("gzip", RemoteError, "gzip-encoded"), ("html", RemoteError, "portal"),
        ("size", SourceError, "bytes long, it is "), ("etag", SourceError, "it is another-version"),
    ],
)  # fmt: skip
def test_an_answer_that_stays_wrong_is_an_error(
    hub: HubServer, kind: str, error: type[PenstockError], word: str
) -> None:
    hub.fault(Fault(kind, port="cdn", skip=2, times=None))
    limits = (
        QUICK if kind in ("no_range", "size", "etag") else IMPATIENT
    )  # those three are believed after a while
    failed(run(hf(CHOSEN), remote=limits), error, "parquet/a.parquet", reason=word)


def test_a_range_that_a_server_does_not_have_is_asked_for_again_and_then_an_error(
    hub: HubServer, expected: Expected
) -> None:
    hub.fault(Fault("status", code=416, port="cdn", skip=2))
    outcome = run(hf(CHOSEN), remote=CALM)
    survived(outcome, expected(CHOSEN))
    assert outcome.faults == {"range": 1}
    hub.fault(Fault("status", code=416, port="cdn", skip=2, times=None))
    failed(run(hf(CHOSEN)), SourceError, "has no bytes", reason="bytes long")


def test_a_token_that_expires_in_mid_run_is_an_error_that_says_what_to_do(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/mine", {"a.parquet": content()[CHOSEN]}, private=True, tokens=("hf_secret",))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def expire() -> None:
        hub.expire_signatures()
        hub.fault(Fault("status", code=401, port="hub", times=None))

    how = {"prefetch_size": 1, "n_workers": 1}
    outcome = run("hf://datasets/org/mine", at={1: expire}, how=how)
    failed(outcome, SourceError, "HF_TOKEN", "A token was sent", reason="private")


# Data that changes


@pytest.mark.parametrize("change", ["content", "size", "gone"])
def test_a_file_that_changes_during_a_run_ends_it(
    outside: Path, expected: Expected, change: str
) -> None:
    data = content()[CHOSEN]
    with FileServer({"a.parquet": data}) as files:
        before = next(iter(files._files.values())).version

        def alter() -> None:
            if change == "gone":
                files.remove("a.parquet")
            else:
                files.put("a.parquet", data[:-1] + b"2" if change == "content" else data + b"more")

        outcome = run(
            files.url_of("a.parquet"), at={1: alter}, how={"prefetch_size": 1, "n_workers": 1}
        )
        now = "" if change == "gone" else next(iter(files._files.values())).version
    text = failed(outcome, SourceError, "/a.parquet", "start a new run")
    assert {
        "content": f"was {before}, it is {now}",
        "size": f"it is {len(data) + 4}",
        "gone": "404",
    }[change] in text
    assert outcome.ledger == expected(CHOSEN)[: len(outcome.ledger)], (
        "nothing of the new version was used"
    )


# Signed addresses


def tries_of_a_read(server: HubServer | FileServer) -> int:
    """How often the range that was asked for most often was asked for, where the bytes are."""
    ranges = Counter(
        (r.path, r.range) for r in server.log if r.port != "hub" and r.range is not None
    )
    return max(ranges.values())


def test_an_address_that_expires_in_mid_run_is_asked_for_again(
    hub: HubServer, expected: Expected
) -> None:
    how = {"prefetch_size": 1, "n_workers": 1}
    outcome = run(
        hf("parquet"),
        at=dict.fromkeys((1, 20, 60), hub.expire_signatures),
        how=how,
        remote=replace(CALM, fetches=1),
    )
    survived(outcome, expected("parquet"))
    # An address may also expire on its way from the Hub to whoever asked for it.
    assert outcome.faults["expired"] > 0
    assert set(outcome.faults) <= {"expired", "status_403"}
    assert 2 <= tries_of_a_read(hub) <= 4


# Every format

PATTERN = {form: f"*{form}" for form in FORMS} | {"parquet": "*.parquet", "texts": "*.txt"}
"""Requests for the content of a form."""


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gets_over_faults_in_its_middle(
    hub: HubServer, expected: Expected, form: str
) -> None:
    pattern = PATTERN[form]
    for kind, details in (
        ("reset", {"after": 500}), ("stall", {"after": 700}), ("status", {}), ("short", {}), ("no_range", {}),
        ("fin", {"after": 300}), ("wrong_range", {}), ("html", {}), ("gzip", {}),
    ):  # fmt: skip
        hub.fault(
            Fault(kind, path=pattern, skip=1, **details)
            if kind != "status"
            else Fault(kind, path=pattern)
        )
    outcome = run(hf(form), remote=replace(QUICK, stall_timeout=0.2, backoff=0.0))
    survived(outcome, expected(form))
    assert sum(outcome.faults.values()) >= 4


# Ending


PATIENT = replace(
    QUICK,
    connect_timeout=30,
    request_timeout=60,
    stall_timeout=30,
    retry_budget=60,
    metadata_budget=60,
    retry_after_cap=60,
)
AT_ONCE_S = 20.0
"""With these, whoever waits for the network waits longer than that."""


@pytest.mark.parametrize(
    "how", [{}, {"workers": "process", "n_workers": 1}], ids=["thread", "process"]
)
@pytest.mark.parametrize("form", ["parquet", "docs.jsonl", "docs.jsonl.gz", "texts"])
@pytest.mark.parametrize("kind", ["silence", "stall", "status"])
def test_shutdown_does_not_wait_for_the_network(
    hub: HubServer, form: str, kind: str, how: dict[str, Any]
) -> None:
    if how and (kind == "stall" or form in ("docs.jsonl", "texts")):
        pytest.skip("as with threads: the parent fetches")
    details: dict[str, Any] = (
        {"after": 20} if kind == "stall" else {"retry_after": 50} if kind == "status" else {}
    )
    hub.fault(
        Fault(kind, path=PATTERN[form], times=None, skip=1 if form == "parquet" else 0, **details)
    )
    loader = loader_of(dataset(hf(form), remote=PATIENT), **how).start()
    wait_until(lambda: any(request.fault for request in hub.log))
    began = time.monotonic()
    loader.shutdown()
    assert time.monotonic() - began < AT_ONCE_S


def test_a_loader_that_nobody_holds_ends_its_fetches(hub: HubServer) -> None:
    hub.fault(Fault("silence", path="*a.parquet", times=None, skip=1))
    loader = loader_of(dataset(hf("parquet"), remote=PATIENT)).start()
    wait_until(lambda: any(request.fault for request in hub.log))
    del loader
    gc.collect()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("penstock-")])


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
