"""Buckets: listing and reading through obstore, from moto's S3 and from a server of files with faults."""

from __future__ import annotations

import os
import shutil
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, CorruptFile, SourceError
from penstock.options import RemoteOptions
from penstock.read.buckets import Bucket
from penstock.read.http import Network
from penstock.read.listing import MetadataCache, RemoteListing, list_files
from penstock.read.remote_files import RemoteFiles
from penstock.read.token_store import TokenStore
from penstock.types import Address, Bad, FileRef
from tests.servers import Fault, FileServer
from tests.test_token_store import REF, assert_same, chunk_of, key_of

obstore = pytest.importorskip("obstore")

AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "me"}
SECRET = "open-sesame-open-sesame"
VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT", "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3", "AWS_SKIP_SIGNATURE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL", "GOOGLE_SKIP_SIGNATURE", "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT", "AZURE_SKIP_SIGNATURE",
)  # fmt: skip
OBJECTS = {
    **{f"data/{i:04}.parquet": b"p" * (i + 1) for i in range(5)},
    "data/deep/er/x.jsonl": b"{}\n",
    "data/_SUCCESS": b"",
    "data/odd name #1%?.txt": b"odd",
    "database/y.parquet": b"not in data",
    "top.parquet": b"0123456789" * 10_000,
}


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """S3 on loopback, with a bucket in it."""
    from moto.server import ThreadedMotoServer
    from obstore.store import S3Store

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    for bucket in ("texts", "tokens"):
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
    store = S3Store("texts", endpoint=url, client_options={"allow_http": True}, skip_signature=True)
    for name, data in OBJECTS.items():
        obstore.put(store, name, data)
    # What consoles make to stand for a folder.
    urllib.request.urlopen(
        urllib.request.Request(f"{url}/texts/data/deep/", data=b"", method="PUT")
    ).close()
    yield url
    server.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return moto


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server of files: it answers what S3 answers to GET and HEAD, and has faults."""
    with FileServer({"texts/top.parquet": OBJECTS["top.parquet"]}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        yield server


@pytest.fixture
def network() -> Iterator[Network]:
    one = Network(
        RemoteOptions(
            metadata_budget=2.0,
            connect_timeout=2.0,
            stall_timeout=0.5,
            request_timeout=3.0,
            backoff=0.02,
        )
    )
    yield one
    one.close()


def names(network: Network, folder: Path, urls: Any) -> list[str]:
    listing = RemoteListing(network, MetadataCache(folder), config=None, offline=False)
    return [file.name for file in list_files(urls, whole=False, remote=listing)]


def read(network: Network, file: FileRef, start: int, length: int) -> bytearray:
    return RemoteFiles(network, {}).read(file, start, length)


TOP = FileRef("s3://texts/top.parquet", "top.parquet", 100_000, "parquet")


# Addresses


# Listing


def test_a_prefix_a_glob_and_a_file_are_listed(s3: str, network: Network, tmp_path: Path) -> None:
    numbers = [f"{i:04}.parquet" for i in range(5)]
    everything = [*numbers, "deep/er/x.jsonl", "odd name #1%?.txt"]
    for url, expected in (
        ("s3://texts/data", everything),
        ("s3://texts/data/", everything),
        ("s3://texts/data/000[1-3].parquet", numbers[1:4]),
        ("s3://texts/data/**/*.jsonl", ["deep/er/x.jsonl"]),
        ("s3://texts/*/*.parquet", [f"data/{name}" for name in numbers] + ["database/y.parquet"]),
        ("s3://texts/top.parquet", ["top.parquet"]),
        ("s3://texts/*.parquet", ["top.parquet"]),
        (
            "s3://texts",
            [f"data/{name}" for name in everything] + ["database/y.parquet", "top.parquet"],
        ),
    ):
        assert names(network, tmp_path, url) == expected


def test_what_is_not_there_is_named(s3: str, network: Network, tmp_path: Path) -> None:
    for url, words in (
        ("s3://texts/nowhere", "s3://texts/nowhere does not exist"),
        ("s3://texts/gone.parquet", r"s3://texts/gone\.parquet does not exist"),
        ("s3://texts/data/*.csv", r"matches no file"),
        ("s3://no-such-bucket/data", "s3://no-such-bucket does not exist"),
    ):
        with pytest.raises(SourceError, match=words):
            names(network, tmp_path, url)


# Credentials


@pytest.mark.parametrize(
    ("variables", "scheme", "word"),
    [
        ({"AWS_ENDPOINT_URL": "", "AWS_SKIP_SIGNATURE": "true"}, "s3", "AWS_PROFILE"),
        ({"GOOGLE_BASE_URL": "", "GOOGLE_SKIP_SIGNATURE": "true"}, "gs", "gcloud auth"),
        ({"AZURE_STORAGE_ENDPOINT": "", "AZURE_SKIP_SIGNATURE": "true"} | AZURE, "az", "az login"),
    ],
)
@pytest.mark.parametrize("status", [401, 403])
def test_refused_access_says_what_to_set(
    plain: FileServer, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str], scheme: str, word: str, status: int,
) -> None:  # fmt: skip
    url = f"{scheme}://texts/top.parquet"
    for name, value in variables.items():
        monkeypatch.setenv(name, value or plain.url)
    plain.fault(
        Fault(
            "status", code=status, method="*", times=None, body=b"<Error><Code>Nope</Code></Error>"
        )
    )
    with pytest.raises(SourceError, match=rf"{url}: access is refused.*{word}"):
        names(network, tmp_path, url)
    with pytest.raises(SourceError, match=rf"{url}: access is refused.*{word}"):
        read(network, FileRef(url, "x", 100_000, "parquet"), 0, 10)


def test_without_obstore_buckets_say_what_to_install(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("penstock.read.buckets.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"reading gs:// needs `obstore`.*penstock\[buckets\]"):
        Bucket(network, "gs://texts", lambda kind, key, make, *_, **__: make()).below("data", True)


# Reading


def test_a_range_is_read_exactly(s3: str, network: Network) -> None:
    for start, length in ((0, 1), (0, 100_000), (99_999, 1), (31_111, 54_321)):
        assert read(network, TOP, start, length) == OBJECTS["top.parquet"][start : start + length]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", code=503), Fault("status", code=429), Fault("silence"), Fault("stall", after=1000),
        Fault("drip", bytes_per_s=20), Fault("reset", after=1000), Fault("fin", after=1000),
        Fault("truncated_chunked", after=1000), Fault("no_range"), Fault("wrong_range"), Fault("short"),
        Fault("gzip"), Fault("garbage"),
    ],
    ids=lambda fault: fault.kind,
)  # fmt: skip
def test_every_fault_is_noticed_and_tried_again(
    plain: FileServer, network: Network, fault: Fault
) -> None:
    plain.fault(fault)
    assert read(network, TOP, 10, 60_000) == OBJECTS["top.parquet"][10:60_010]
    assert network.stats.faults.total() == 1


@pytest.mark.parametrize("form", ["parquet", "docs.jsonl", "docs.jsonl.gz"])
def test_a_stream_from_a_bucket_is_that_of_a_local_copy_and_stays(
    s3: str, corpus: Path, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from obstore.store import S3Store

    from penstock import AsyncDataLoader, TextDataset
    from tests.contracts import take

    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    store = S3Store("texts", endpoint=s3, client_options={"allow_http": True}, skip_signature=True)
    paths = [corpus / form] if (corpus / form).is_file() else sorted((corpus / form).iterdir())
    for path in paths:
        obstore.put(store, f"streams/{path.relative_to(corpus)}", path.read_bytes())

    def stream(url: Any, **how: Any) -> tuple[list[str], Any]:
        data = TextDataset(url, tokenizer="byte", seq_len=32)
        with AsyncDataLoader(data, 4, shuffle=True, seed=2, epochs=2, **how) as loader:
            return take(loader, 10**6), loader.stats()

    local, _ = stream(corpus / form)
    first, fetched = stream(f"s3://texts/streams/{form}")
    again, kept = stream(f"s3://texts/streams/{form}", n_workers=0)
    assert first == again == local
    assert fetched.fetched_bytes > 0 == kept.fetched_bytes
    assert kept.cache_misses == 0


def test_training_on_a_bucket_stops_and_resumes_as_on_a_local_copy(s3: str, tmp_path: Path) -> None:
    from obstore.store import S3Store

    from tests.faults.serving import documents
    from tests.train.runs import SMALL, train, write_texts

    docs = write_texts(tmp_path / "docs.jsonl", documents())
    store = S3Store("texts", endpoint=s3, client_options={"allow_http": True}, skip_signature=True)
    obstore.put(store, "training/docs.jsonl", docs.read_bytes())
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    small = (*SMALL, "--lr-warmup", 100)  # the rate must not depend on the last step
    local = train(tmp_path / "disk" / "out", "--dataset", docs, *small, "--steps", 6).good()
    out, how = tmp_path / "s3" / "out", ("--dataset", "s3://texts/training", *small)
    begun = train(out, *how, "--steps", 3, **aws).good().losses()
    shutil.rmtree(tmp_path / "s3" / "cache")  # the resumed run has to fetch again
    resumed = train(out, *how, "--steps", 6, "--resume", **aws).good().losses()
    assert (list(begun), list(resumed)) == ([1, 2, 3], [4, 5, 6])
    assert begun | resumed == local.losses()


# The token store


def test_a_bucket_holds_the_same_entries_as_a_folder(s3: str, tmp_path: Path) -> None:
    from obstore.store import S3Store

    bucket = "s3://tokens/corpus"
    there, here = TokenStore(bucket, block_bytes=400), TokenStore(tmp_path, block_bytes=400)
    chunk = chunk_of([[i] * 70 for i in range(30)], bad=[Bad(Address("a", 0, 1), "x", "y" * 90000)])
    assert there.get(key_of(0), REF) is None
    assert not there.exists(key_of(0))
    assert list(there.list()) == []
    for store in (there, here):
        store.put(key_of(0), chunk)
        store.put(key_of(1), chunk_of([]))
    assert there.exists(key_of(0))
    assert [(e.name, e.size) for e in there.list()] == [(e.name, e.size) for e in here.list()]
    assert_same(there.get(key_of(0), REF), chunk)
    assert_same(there.get(key_of(1), REF), chunk_of([]))
    header = there.header(key_of(0).name)
    docs, rows = there.read_blocks(key_of(0).name, header.blocks[2:4])
    first = sum(block.documents for block in header.blocks[:2])
    assert docs.to_pylist() == chunk.docs.to_pylist()[first : first + len(rows)]
    content = (tmp_path / key_of(0).name).read_bytes()
    raw = S3Store("tokens", endpoint=s3, client_options={"allow_http": True})
    obstore.put(raw, f"corpus/{key_of(0).name}", content[:-100])
    with pytest.raises(CorruptFile, match=f"{bucket}/{key_of(0).name}"):
        there.get(key_of(0), REF)
    assert [name for name, _ in there.verify()] == [key_of(0).name]
    there.remove([key_of(0).name])
    assert [entry.name for entry in there.list()] == [key_of(1).name]


def test_an_error_of_a_token_store_names_the_bucket_and_no_secret(s3: str) -> None:
    missing = TokenStore("s3://nowhere/corpus")
    with pytest.raises(SourceError, match="s3://nowhere/corpus does not exist") as raised:
        list(missing.list())
    assert SECRET not in "".join(traceback.format_exception(raised.value))
