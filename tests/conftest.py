"""Fixtures of every test: its own cache, loopback only, and no thread left behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.contracts")
settings.register_profile("untimed", deadline=None)  # a timing is never a pass or fail
settings.load_profile("untimed")


OUTSIDE = "HF_TOKEN HF_ENDPOINT HF_HUB_OFFLINE RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
"""Variables of the environment that would change what a test does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, so that none of them is left for the end."""
    items.sort(key=lambda item: not {"distributed", "train"} & set(item.path.parts))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache of the test run, and no variables of a launcher or of the Hub."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in OUTSIDE.split():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that connects to another machine."""
    real = socket.socket.connect

    def connect(sock: socket.socket, address: Any) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            assert ip_address(address[0].partition("%")[0]).is_loopback, (
                f"a test reached for {address}"
            )
        real(sock, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves one of our threads running."""
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("penstock-")]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files of every format with texts of many lengths; see `tests.corpus`."""
    from tests.corpus import write_corpus

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Make torch forget what it compiled before and in the test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
