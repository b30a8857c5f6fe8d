"""The loopback servers do what they say: every endpoint and every fault, as a client sees it."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.errors import ConfigError
from tests.servers import Chaos, Fault, FileServer, HubServer

ROOT = Path(__file__).parent.parent

DATA = bytes(range(256)) * 40
SHA = hashlib.sha256(DATA).hexdigest()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
    """One request; `if_match="x"` is the header If-Match."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(
            method, f"{parts.path}?{parts.query}" if parts.query else parts.path, body, sent
        )
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


def follow(url: str, **headers: str) -> Answer:
    answer = ask(url, **headers)
    return ask(answer.headers["location"], **headers) if answer.status == 302 else answer


def raw(url: str, head: str = "", quiet_after: int | None = None) -> tuple[bytes, str]:
    """All that comes over a connection until it ends, and how: "end", "reset" or "quiet".

    It is quiet if nothing more comes after so many bytes of body (-1: after none at all, not even a head).
    """
    parts = urlsplit(url)
    got = b""
    with socket.create_connection(
        (str(parts.hostname), parts.port or 80), timeout=20
    ) as connection:
        connection.sendall(f"GET {parts.path} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        try:
            while True:
                if quiet_after is not None and (
                    quiet_after < 0 or (got and len(body_of(got)) >= quiet_after)
                ):
                    connection.settimeout(0.1)
                if not (data := connection.recv(1 << 16)):
                    break
                got += data
        except ConnectionResetError:
            return got, "reset"
        except TimeoutError:
            return got, "quiet"
    return got, "end"


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Files


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize(
    ("asked", "lo", "hi"),
    [
        ("0-0", 0, 1),
        ("5-99", 5, 100),
        ("10000-", 10000, 10240),
        ("-7", 10233, 10240),
        ("9-99999", 9, 10240),
    ],
)
def test_a_range_of_a_file_is_what_was_asked_for(
    where: str, asked: str, lo: int, hi: int, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with FileServer({"x": DATA if where == "memory" else tmp_path / "x"}) as server:
        whole, part = ask(server.url_of("x")), ask(server.url_of("x"), range=f"bytes={asked}")
    assert (whole.status, whole.body, whole.headers["etag"]) == (200, DATA, part.headers["etag"])
    assert (part.status, part.body) == (206, DATA[lo:hi])
    assert part.headers["content-range"] == f"bytes {lo}-{hi - 1}/{len(DATA)}"


def test_the_log_shows_each_request_and_its_connection() -> None:
    with FileServer({"x": DATA}) as server:
        with closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as connection:
            for number in range(2):
                connection.request(
                    "GET", f"/x?n={number}", headers={"Range": "bytes=0-9", "X-Own": "1"}
                )
                connection.getresponse().read()
        ask(server.url_of("x"), "HEAD")
        first, second, third = server.log
        server.clear_log()
        assert server.log == []
    assert (first.number, first.port, first.method, first.path, first.query) == (
        0,
        "files",
        "GET",
        "/x",
        "n=0",
    )
    assert (first.range, first.status, first.sent, first.headers["x-own"], first.fault) == (
        (0, 10),
        206,
        10,
        "1",
        "",
    )
    assert first.connection == second.connection != third.connection
    assert (third.range, third.sent) == (None, 0)
    assert first.time <= second.time <= third.time


# Faults


def struck(kind: str, quiet_after: int | None = None, **options: Any) -> tuple[bytes, str]:
    """What a client gets, byte for byte, where this fault strikes."""
    with FileServer({"x": DATA}) as server:
        server.fault(Fault(kind, **options))
        got = raw(server.url_of("x"), "Connection: close\r\n", quiet_after)
        eventually(lambda: [request.fault for request in server.log] == [kind])
        assert raw(server.url_of("x"), "Connection: close\r\n")[0].endswith(DATA), "once is enough"
        assert [request.fault for request in server.log] == [kind, ""]
        return got


def test_status_answers_with_a_code_and_may_say_when_to_come_back() -> None:
    with FileServer({"x": DATA}) as server:
        server.fault(Fault("status"))
        server.fault(
            Fault("status", code=429, retry_after="7", headers={"X-Own": "1"}, body=b"wait")
        )
        first, second, third = (ask(server.url_of("x")) for _ in range(3))
    assert (first.status, first.body) == (503, b"")
    assert (second.status, second.headers["retry-after"], second.headers["x-own"]) == (
        429,
        "7",
        "1",
    )
    assert second.body == b"wait"
    assert third.status == 200


@pytest.mark.parametrize(("kind", "end"), [("stall", "quiet"), ("reset", "reset"), ("fin", "end")])
def test_a_cut_leaves_the_bytes_before_it_and_nothing_after(kind: str, end: str) -> None:
    for after in (0, 1, 1000, len(DATA) - 1):
        got, how = struck(kind, after if kind == "stall" else None, after=after)
        assert how == end
        assert b"Content-Length: 10240\r\n" in got
        assert body_of(got) == DATA[:after]
    assert struck(kind, -1 if kind == "stall" else None, after=-1) == (b"", end)


def test_a_fault_strikes_what_matches_after_what_it_skips_and_as_often_as_it_should() -> None:
    with FileServer({"a/x": DATA, "b/x": DATA}) as server:
        fault = Fault("status", path="/a/*", skip=1, times=2)
        server.fault(fault)
        server.fault(Fault("status", path="/a/*", method="HEAD", code=500, times=None))
        asked = [
            ask(server.url_of(name)).status for name in ("a/x", "b/x", "a/x", "a/x", "b/x", "a/x")
        ]
        assert asked == [200, 200, 503, 503, 200, 200]
        assert fault.struck == 2
        assert [ask(server.url_of("a/x"), "HEAD").status for _ in range(3)] == [500] * 3
        server.clear_faults()
        assert ask(server.url_of("a/x"), "HEAD").status == 200


def chaos(seed: int, order: list[int], rate: float = 0.3) -> tuple[dict[int, str], Chaos]:
    """The faults that requests meet, by the file they ask for."""
    with FileServer({str(number): DATA for number in range(60)}) as server:
        made = Chaos(
            seed,
            rate,
            kinds=("status", "slow", "flip", "short"),
            details={"slow": {"delay_s": 0.001}},
        )
        server.fault(made)
        for number in order:
            ask(server.url_of(str(number)))
        return {int(request.path[1:]): request.fault for request in server.log}, made


def test_chaos_depends_on_the_seed_and_not_on_the_order() -> None:
    order = list(range(60))
    faults, made = chaos(1, order)
    assert faults == chaos(1, order[::-1])[0] != chaos(2, order)[0]
    assert made.struck.total() == sum(1 for kind in faults.values() if kind)
    assert set(made.struck) == {"status", "slow", "flip", "short"}
    assert not any(chaos(1, order[:5], rate=0.0)[0].values())
    assert all(chaos(1, order[:5], rate=1.0)[0].values())


# The Hub

CARD = "---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n# A dataset\n"
FILES = {"data/a.parquet": DATA, "data/deep/b.jsonl": b"{}\n", "c.txt": b"text"}


def api(hub: HubServer, rest: str, token: str = "", **options: Any) -> Answer:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return ask(f"{hub.endpoint}/api/datasets/{rest}", **headers, **options)


def test_a_commit_moves_main_and_leaves_what_was() -> None:
    with HubServer() as hub:
        repo = hub.add("org/name", FILES)
        before = repo.sha
        repo.branch("v1", before)
        after = repo.commit({"c.txt": None, "data/a.parquet": b"new"})
        assert (
            after
            == repo.sha
            == api(hub, "org/name").json["sha"]
            != before
            == api(hub, "org/name/revision/v1").json["sha"]
        )
        files = f"{hub.endpoint}/datasets/org/name/resolve"
        assert (
            follow(f"{files}/{before}/data/a.parquet").body
            == follow(f"{files}/v1/data/a.parquet").body
            == DATA
        )
        assert (
            follow(f"{files}/{after}/data/a.parquet").body
            == follow(f"{files}/main/data/a.parquet").body
            == b"new"
        )
        gone = ask(f"{files}/main/c.txt")
        assert (gone.status, gone.headers["x-error-code"]) == (404, "EntryNotFound")
        assert ask(f"{files}/v1/c.txt").body == b"text"
        repo.branch("refs/convert/parquet", before)
        assert ask(f"{files}/refs%2Fconvert%2Fparquet/c.txt").body == b"text"
        assert repo.commit({"c.txt": b"text", "data/a.parquet": DATA}) == before
        with pytest.raises(ConfigError, match="no nothing that could be removed"):
            repo.commit({"nothing": None})


def test_a_large_file_is_redirected_to_a_signed_address_on_the_other_port() -> None:
    with HubServer() as hub:
        repo = hub.add("org/name", FILES)
        url = f"{hub.endpoint}/datasets/org/name/resolve/main/data/a.parquet"
        for method in ("HEAD", "GET"):
            answer = ask(url, method, range="bytes=0-9")
            assert answer.status == 302
            assert answer.headers["location"].startswith(f"{hub.cdn}/{SHA}?Expires=")
            assert answer.headers["x-linked-etag"] == f'"{SHA}"'
            assert answer.headers["x-linked-size"] == str(len(DATA))
            assert answer.headers["x-repo-commit"] == repo.sha
        signed = answer.headers["location"]
        part = ask(signed, range="bytes=5-9")
        assert (part.status, part.body, part.headers["etag"]) == (206, DATA[5:10], f'"{SHA}"')
        assert part.headers["content-range"] == f"bytes 5-9/{len(DATA)}"
        assert ask(signed, range="bytes=99999-").status == 416
        assert ask(signed.replace(SHA, "0" * 64)).status == 403
        assert ask(signed.replace("Expires=1", "Expires=9")).status == 403
        assert ask(signed.partition("?")[0]).status == 403
        hub.expire_signatures()
        assert ask(signed).status == 403
        assert follow(url).body == DATA
        assert {request.port for request in hub.log} == {"hub", "cdn"}
    with HubServer(sign_for_s=0.0, cdn_etags="other") as hub:
        hub.add("org/name", FILES)
        signed = ask(f"{hub.endpoint}/datasets/org/name/resolve/main/data/a.parquet").headers[
            "location"
        ]
        time.sleep(0.01)
        assert ask(signed).status == 403
        hub.sign_for_s = 60.0
        assert (
            SHA
            not in follow(f"{hub.endpoint}/datasets/org/name/resolve/main/data/a.parquet").headers[
                "etag"
            ]
        )


@pytest.mark.parametrize(
    ("name", "token", "info", "file", "code"),
    [
        ("org/open", "", 200, 302, ""),
        ("org/none", "", 401, 401, "RepoNotFound"),
        ("org/none", "hf_wrong", 401, 401, "RepoNotFound"),
        ("org/none", "hf_secret", 404, 404, "RepoNotFound"),
        ("org/private", "", 401, 401, "RepoNotFound"),
        ("org/private", "hf_denied", 404, 404, "RepoNotFound"),
        ("org/private", "hf_secret", 200, 302, ""),
        ("org/gated", "", 401, 401, "GatedRepo"),
        ("org/gated", "hf_denied", 403, 403, "GatedRepo"),
        ("org/gated", "hf_secret", 200, 302, ""),
        ("org/files", "", 200, 401, "GatedRepo"),
        ("org/files", "hf_denied", 200, 403, "GatedRepo"),
        ("org/files", "hf_secret", 200, 302, ""),
    ],
)
def test_who_may_read_what(name: str, token: str, info: int, file: int, code: str) -> None:
    with HubServer() as hub:
        hub.add("org/open", FILES)
        hub.add("org/private", FILES, private=True, denied_tokens=("hf_denied",))
        hub.add("org/gated", FILES, gated=True, denied_tokens=("hf_denied",))
        hub.add("org/files", FILES, gated="files", denied_tokens=("hf_denied",))
        asked = api(hub, name, token)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        read = ask(f"{hub.endpoint}/datasets/{name}/resolve/main/data/a.parquet", **headers)
        assert (asked.status, api(hub, f"{name}/tree/main", token).status, read.status) == (
            info,
            info,
            file,
        )
        assert read.headers.get("x-error-code", "") == code
        unknown = api(hub, f"{name}/revision/nothing", token)
        assert unknown.headers["x-error-code"] == ("RevisionNotFound" if info == 200 else code)
        who = ask(f"{hub.endpoint}/api/whoami-v2", **headers).status
        assert who == (200 if token in ("hf_secret", "hf_denied") else 401)


CLIENTS = """
import json, sys
import datasets
from huggingface_hub import HfApi, errors, hf_hub_download

def refusal(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__

api = HfApi()
tree = list(api.list_repo_tree("org/name", repo_type="dataset", recursive=True))
path = hf_hub_download("org/name", "data/train-1.parquet", repo_type="dataset")
print(json.dumps({
    "sha": api.dataset_info("org/name").sha,
    "tree": [item.path for item in tree],
    "lfs": tree[2].lfs.sha256,
    "info": [item.path for item in api.get_paths_info("org/name", ["README.md"], repo_type="dataset")],
    "path": path,
    "card": open(hf_hub_download("org/name", "README.md", repo_type="dataset")).read(),
    "private": open(hf_hub_download("org/private", "c.txt", repo_type="dataset", token="hf_secret")).read(),
    "refused": [
        refusal(lambda: api.dataset_info("org/none")),
        refusal(lambda: api.dataset_info("org/private")),
        refusal(lambda: api.dataset_info("org/gated")),
        refusal(lambda: api.dataset_info("org/name", revision="no")),
        refusal(lambda: hf_hub_download("org/name", "no", repo_type="dataset")),
    ],
    "rows": [row["text"] for row in datasets.load_dataset("org/name", split="train", streaming=True)],
}))
"""


def test_the_real_clients_work_with_it(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {}
    for number in range(3):
        file = io.BytesIO()
        pq.write_table(pa.table({"text": [f"{number} {row}" for row in range(10)]}), file)
        files[f"data/train-{number}.parquet"] = file.getvalue()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with HubServer(page_size=2) as hub:
        repo = hub.add("org/name", files, card=CARD)
        hub.add("org/private", FILES, private=True)
        hub.add("org/gated", FILES, gated=True)
        environment |= {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
        }
        environment |= {"HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert not [
            request
            for request in hub.log
            if request.port == "cdn" and "authorization" in request.headers
        ]
        assert [request for request in hub.log if request.port == "cdn" and request.range]
    seen = json.loads(done.stdout)
    assert seen["sha"] == repo.sha
    assert seen["tree"] == ["README.md", "data", *files]
    assert seen["lfs"] == hashlib.sha256(files["data/train-0.parquet"]).hexdigest()
    assert seen["info"] == ["README.md"]
    assert Path(seen["path"]).read_bytes() == files["data/train-1.parquet"]
    assert (seen["card"], seen["private"]) == (CARD, "text")
    assert seen["refused"] == [
        "RepositoryNotFoundError", "RepositoryNotFoundError", "GatedRepoError",
        "RevisionNotFoundError", "RemoteEntryNotFoundError",
    ]  # fmt: skip
    assert seen["rows"] == [f"{number} {row}" for number in range(3) for row in range(10)]


# As a process


def run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.servers", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_a_hub_runs_as_a_process_of_its_own_and_leaves_a_log_without_secrets(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(DATA)
    (folder / "b.parquet").write_bytes(DATA[::-1])
    (folder / "README.md").write_text(CARD)
    port_file, log = tmp_path / "port", tmp_path / "log"
    options = [
        "--repo",
        "org/name",
        "--copies",
        "5",
        "--page-size",
        "2",
        "--latency-ms",
        "1",
        "--bandwidth-mb",
        "50",
    ]
    with run(
        "hub", "--dir", str(folder), *options, "--port-file", str(port_file), "--log", str(log)
    ) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        eventually(port_file.exists)
        assert port_file.read_text() == endpoint + "\n"
        files = f"{endpoint}/datasets/org/name/resolve/main"
        names = [f"data/train-{number:05d}-of-00005.parquet" for number in range(5)]
        bodies = [follow(f"{files}/{name}", authorization="Bearer hf_x").body for name in names]
        assert bodies == [DATA, DATA[::-1], DATA, DATA[::-1], DATA]
        assert ask(f"{files}/README.md").body.decode() == CARD
        assert len(ask(f"{endpoint}/api/datasets/org/name/tree/main?recursive=true").json) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [302, 200] * 5 + [200, 200]
    assert "hf_x" not in log.read_text()
    assert "Signature=hidden" in log.read_text()


def test_a_file_server_runs_as_a_process_of_its_own_with_faults(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x").write_bytes(DATA)
    options = ["--fault-rate", "1.0", "--fault-kinds", "status,short", "--seed", "3"]
    with run("files", "--dir", str(tmp_path), *options) as process:
        assert process.stdout is not None
        url = f"{process.stdout.readline().strip()}/deep/x"
        answers = [ask(url) for _ in range(10)]
        assert all(answer.status >= 400 or answer.body == DATA[:5120] for answer in answers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
