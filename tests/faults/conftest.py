"""What the tests of remote faults get: a Hub with texts, and the streams that a local copy of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import serving
from tests.servers import HubServer

HF = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT",
    "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "SSL_CERT_FILE",
)  # fmt: skip


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing kept, nothing set: the folder where things will be kept."""
    for name in HF:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def serving_hub() -> Iterator[HubServer]:
    with HubServer(page_size=4) as server:
        serving.repository(server)
        yield server


@pytest.fixture
def hub(serving_hub: HubServer, outside: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A Hub with the repository org/name, without faults as yet."""
    monkeypatch.setenv("HF_ENDPOINT", serving_hub.endpoint)
    serving_hub.clear_faults()
    serving_hub.clear_log()
    return serving_hub


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, on disk."""
    return serving.write(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="session")
def expected(local: Path) -> Callable[..., list[str]]:
    """The stream of a local copy of some of the repository's files."""
    known: dict[str, list[str]] = {}

    def ledger(form: str, **how: Any) -> list[str]:
        key = f"{form} {sorted(how.items(), key=str)}"
        if key not in known:
            outcome = serving.run(local / form, how)
            assert outcome.error is None
            assert len(outcome.ledger) > 5
            known[key] = outcome.ledger
        return known[key]

    return ledger
