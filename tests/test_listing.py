"""Listing what is elsewhere: which files, by how many requests, what is kept, and what is never asked for."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import ConfigError, TextDataset
from penstock.errors import RemoteError, SourceError
from penstock.feed.worker_pool import ThreadPool
from penstock.options import RemoteOptions
from penstock.read.http import Network
from penstock.read.listing import (
    MetadataCache,
    RemoteListing,
    list_files,
)
from penstock.types import FileRef
from tests.servers import Fault, FileServer, HubServer

TOKEN = "hf_very_secret_indeed"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files: sample/10BT/*
---
# Text
"""
FILES: dict[str, bytes] = {
    **{
        f"data/{part}/{i:03}.parquet": f"{part}{i}".encode()
        for part in ("x", "y")
        for i in range(3)
    },
    **{f"sample/10BT/{i:03}.parquet": f"s{i}".encode() for i in range(2)},
    "sample/10BT/deeper/z.jsonl": b"{}",
    "sample/10BT/_marker.jsonl": b"{}",
    "notes.txt": b"a note",
}


@pytest.fixture(autouse=True)
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer({"dir/a.parquet": b"aaaa", "dir/b.jsonl": b"bb", "c.txt": b""}) as server:
        yield server


class Lister:
    """Lists as a dataset would, with a disk of its own and short deadlines."""

    def __init__(self, folder: Path) -> None:
        self.kept = MetadataCache(folder)
        self.threads = ThreadPool(4, None)
        limits = RemoteOptions(metadata_budget=3.0, stall_timeout=0.5, backoff=0.02)
        self.network = Network(limits, self.threads)
        self.remote: RemoteListing | None = None

    def __call__(
        self, urls: Any, config: str | None = None, offline: bool = False, **more: Any
    ) -> tuple[FileRef, ...]:
        self.remote = RemoteListing(self.network, self.kept, config=config, offline=offline)
        return list_files(urls, remote=self.remote, **{"whole": False, **more})

    def names(self, urls: Any, config: str | None = None, **more: Any) -> list[str]:
        return [file.name for file in self(urls, config, **more)]

    def close(self) -> None:
        self.network.close()
        self.threads.stop()
        assert self.threads.join(10.0)


@pytest.fixture
def lister(tmp_path: Path) -> Iterator[Lister]:
    one = Lister(tmp_path / "kept")
    yield one
    one.close()


def asked(server: HubServer | FileServer) -> list[str]:
    """What was asked for since last time: the last parts of paths are enough to tell."""
    kinds = []
    for request in server.log:
        parts = request.path.split("/")
        known = [word for word in ("revision", "tree", "resolve") if word in parts]
        kinds.append(known[0] if known else f"{request.method} {request.path}")
    server.clear_log()
    return kinds


# Which files


def test_a_folder_a_glob_and_a_file_are_named_as_a_local_copy_would_be(
    hub: HubServer, lister: Lister, tmp_path: Path
) -> None:
    hub.add("org/name", FILES, card=CARD)
    copy = tmp_path / "copy"
    for name, data in {**FILES, "README.md": CARD.encode()}.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    for path in ("data", "data/", "sample/10BT", "data/*/*.parquet", "data/x/00[12].parquet", "**/*.jsonl", "*",
                 "sample/**", "sample/*/_*", "**", "*/*/*", "data/**/*", "d[!x]ta/?/*", "**/x/*", "**/**/*.jsonl", "notes.txt", "sample/10BT/001.parquet"):  # fmt: skip
        local = list_files(f"{copy}/{path}", whole=False)
        away = lister(f"hf://datasets/org/name/{path}")
        assert [(f.name, f.size, f.format, f.codec) for f in away] == [
            (f.name, f.size, f.format, f.codec) for f in local
        ]


def test_a_file_carries_its_commit_its_size_and_its_etag(hub: HubServer, lister: Lister) -> None:
    repo = hub.add("org/name", FILES)
    (file,) = lister("hf://datasets/org/name/data/x/001.parquet")
    assert file.path == f"hf://datasets/org/name@{repo.sha}/data/x/001.parquet"
    assert (file.size, len(file.etag), file.remote) == (2, 64, True)
    (small,) = lister("https://huggingface.co/datasets/org/name/blob/main/notes.txt")
    assert len(small.etag) == 40


def test_the_card_decides_what_a_repository_means(hub: HubServer, lister: Lister) -> None:
    hub.add("org/name", FILES, card=CARD)
    assert lister.names("hf://datasets/org/name") == [
        name for name in FILES if name.startswith("data/")
    ]
    sample = [f"sample/10BT/{name}" for name in ("000.parquet", "001.parquet", "_marker.jsonl")]
    assert lister.names("hf://datasets/org/name", "sample-10BT") == sample


# By how many requests


def test_a_branch_costs_one_request_and_its_pages_and_later_one(
    hub: HubServer, lister: Lister
) -> None:
    hub.page_size = 4
    hub.add("org/name", {f"d/{i}.parquet": b"x" for i in range(10)})
    assert len(lister("hf://datasets/org/name/d")) == 10
    assert asked(hub) == ["revision", "tree", "tree", "tree"]
    lister(["hf://datasets/org/name/d", "hf://datasets/org/name/d/1.parquet"])
    assert asked(hub) == ["revision", "tree", "tree", "tree"], "the folder is asked for by itself"
    lister(["hf://datasets/org/name/d", "hf://datasets/org/name/d/1.parquet"])
    assert asked(hub) == ["revision"]


# RemoteError


def test_offline_says_what_is_missing_and_how_to_get_it(
    hub: HubServer, files: FileServer, lister: Lister
) -> None:
    repo = hub.add("org/name", FILES, card=CARD)
    commit = f"hf://datasets/org/name@{repo.sha}"
    for url, words in (
        ("hf://datasets/org/name/data", "hf://datasets/org/name@main is not .*no revisions"),
        (f"{commit}/data", f"{commit}/data is not .*no listings"),
        (commit, f"{commit}/README.md is not .*no cards"),
        (files.url_of("c.txt"), "http://.*/c.txt is not .*no files"),
    ):
        with pytest.raises(RemoteError, match=rf"{words}.*HF_HUB_OFFLINE=0.*same cache"):
            lister(url, offline=True)
    assert hub.log == files.log == []


# Hostile servers and cards


@pytest.mark.parametrize("key", ["data_files", "data_dir"])
def test_a_card_names_files_of_its_own_repository_only(
    hub: HubServer, files: FileServer, lister: Lister, key: str
) -> None:
    elsewhere = (files.url_of("dir/a.parquet"), "hf://datasets/a/b/c", "/etc/passwd", "a/../../x")
    for number, pattern in enumerate(elsewhere):
        card = f'---\nconfigs:\n- config_name: a\n  {key}: "{pattern}"\n---\n'
        hub.add(f"org/n{number}", FILES, card=card)
        with pytest.raises(ConfigError, match="its own repository only"):
            lister(f"hf://datasets/org/n{number}")
    assert files.log == []


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../x.parquet"}, {"path": "d/../../x.parquet"}, {"path": "d//x.parquet"}, {"path": "d/a\0.parquet"},
        {"path": "d\\x.parquet"}, {"path": None}, {"path": "d/\ud800.parquet"}, {"path": "elsewhere/x.parquet"},
        {"size": -1}, {"size": "7"}, {"oid": 7}, {"oid": "a\nb"},
    ],
)  # fmt: skip
def test_a_listing_that_leads_elsewhere_is_refused(
    hub: HubServer, lister: Lister, entry: dict[str, Any]
) -> None:
    hub.add("org/name", FILES)
    bad = {"type": "file", "path": "d/x.parquet", "size": 1, "oid": "0" * 40} | entry
    hub.fault(Fault("status", code=200, path="*/tree/*", body=json.dumps([bad]).encode()))
    with pytest.raises(SourceError, match=r"hf://datasets/org/name@.*its listing is malformed"):
        lister("hf://datasets/org/name/d")


@pytest.mark.parametrize("link", ["http://127.0.0.2:{port}/x", "{other}/x", "file:///etc/passwd"])
def test_the_next_page_is_on_the_same_server_or_not_asked_for(
    hub: HubServer, files: FileServer, lister: Lister, link: str
) -> None:
    hub.add("org/name", FILES)
    url = link.format(port=hub.endpoint.rpartition(":")[2], other=files.url)
    link = {"Link": f'<{url}>; rel="next"'}
    hub.fault(Fault("status", code=200, path="*/tree/*", body=b"[]", headers=link))
    with pytest.raises(SourceError, match="next page"):
        lister("hf://datasets/org/name/data")
    assert (len(asked(hub)), files.log) == (2, [])


# Access


@pytest.mark.parametrize("token", [None, TOKEN])
def test_gated_private_and_unknown_data_say_what_to_do(
    hub: HubServer, lister: Lister, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/gated", FILES, gated=True, denied_tokens=(TOKEN,))
    hub.add("org/private", FILES, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    wanted = {
        "gated": "is gated: accept",
        "private": "or it is private",
        "none": "no dataset org/none",
    }
    for name, words in wanted.items():
        with pytest.raises(SourceError, match=rf"{words}.*HF_TOKEN") as caught:
            lister(f"hf://datasets/org/{name}/data")
        assert ("A token was sent" if token else "No token was sent") in str(caught.value)
        assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_unknown_revisions_folders_and_files_are_named(hub: HubServer, lister: Lister) -> None:
    hub.add("org/name", FILES)
    for url, words in (
        ("@v9/data", "@v9 does not exist"),
        ("@" + "0" * 40 + "/data", "@0+/data does not exist"),
        ("/nowhere", "nowhere does not exist"),
        ("/data/x/9.parquet", r"9\.parquet does not exist"),
        ("/nowhere/9.parquet", r"9\.parquet does not exist"),
        ("/data/*.parquet", r"data/\*\.parquet matches no file"),
    ):
        with pytest.raises(SourceError, match=words):
            lister(f"hf://datasets/org/name{url}")


# http(s)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://h.test/dir/", "web servers have no listing"),
        ("https://h.test/*.parquet", "web servers have no listing"),
        ("https://h.test:99999/a.parquet", "malformed"),
        ("https://h.test/a b.parquet", "malformed"),
        ("https://h.test/a.parquet.gz", "all but Parquet also .gz"),
        ("ftp://h.test/a.parquet", "ftp://… cannot be read"),
        ("s3://key:sesame@bucket/a", "bucket"),
        ("s3://bucket/../a", "path does not fit"),
        ("http://127.0.0.1/a.parquet?x", "given twice"),
    ],
)
def test_addresses_that_cannot_be_read_are_refused_before_anything_is_asked(
    files: FileServer, lister: Lister, url: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        lister([files.url_of("dir/a.parquet"), "http://127.0.0.1/a.parquet", url])
    assert files.log == []


# Folders on disk


NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that another user can look into."""
    made = Path(tempfile.mkdtemp(prefix="penstock-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def as_another() -> Iterator[None]:
    """For root, who may read everything, somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield
    if root:
        os.seteuid(0)


def write_text(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
    return path


def names(source: Path) -> list[str]:
    return [file.name for file in list_files(str(source), whole=False)]


def test_a_folder_that_cannot_be_listed_is_an_error(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    for name in "abc":
        write_text(folder / "data" / name / "x.txt")
    assert names(folder / "data") == ["a/x.txt", "b/x.txt", "c/x.txt"]
    (folder / "data" / "b").chmod(0)
    request.getfixturevalue("as_another")
    with pytest.raises(SourceError, match=r"data/b: its files cannot be listed: Permission denied"):
        names(folder / "data")


def test_folders_that_links_lead_to_are_read_as_a_glob_reads_them(tmp_path: Path) -> None:
    write_text(tmp_path / "elsewhere" / "deep" / "z.txt")
    write_text(tmp_path / "data" / "y.txt")
    (tmp_path / "data" / "link").symlink_to("../elsewhere")
    found = names(tmp_path / "data")
    assert found == ["link/deep/z.txt", "y.txt"]
    assert found == names(tmp_path / "data" / "**" / "*.txt")


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").symlink_to("gone.txt")
    with pytest.raises(SourceError, match=r"x\.txt is a link to nothing"):
        names(tmp_path)


@pytest.mark.parametrize("source", ["", ["", "x.txt"]])
def test_an_empty_address_is_not_the_folder_we_are_in(
    source: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "x.txt")
    with pytest.raises(ConfigError, match="urls must be a path"):
        TextDataset(source, tokenizer="byte", seq_len=8)


# The metadata cache


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_an_entry_that_was_cut_or_flipped_anywhere_is_ignored(tmp_path: Path) -> None:
    cache = MetadataCache(tmp_path)
    cache.put("things", "key", b"some\nbytes")
    assert MetadataCache(tmp_path).get("things", "key") == b"some\nbytes"
    assert cache.get("others", "key") is None
    (path,) = files_in(tmp_path)
    good = path.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    for bad in [good[:n] for n in range(len(good))] + flipped + [good + b"x"]:
        path.write_bytes(bad)
        assert cache.get("things", "key") is None


def test_a_disk_that_takes_nothing_costs_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = MetadataCache(tmp_path / "file")
    for i in range(3):
        cache.put("things", str(i), b"made")
        assert cache.get("things", str(i)) is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(tmp_path / "file") in warning


def test_the_cache_is_bounded_and_loses_its_oldest_first(tmp_path: Path) -> None:
    cache = MetadataCache(tmp_path, max_bytes=100_000)
    for i in range(400):
        cache.put("things", str(i), b"x" * 900)
    left = [i for i in range(400) if cache.get("things", str(i)) is not None]
    # It is looked at now and then only, so some more may have come since.
    assert sum(path.stat().st_size for path in files_in(tmp_path)) < 300_000
    assert left == list(range(400 - len(left), 400))
