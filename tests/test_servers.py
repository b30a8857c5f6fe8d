"""The loopback servers do what they say: every endpoint and every fault, as a client sees it."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.servers import Chaos, Fault, FileServer, HubServer

ROOT = Path(__file__).parent.parent

DATA = bytes(range(256)) * 40


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


def test_a_hub_runs_as_a_process_of_its_own_and_leaves_a_log_without_secrets(
    tmp_path: Path,
) -> None:
    folder, log = tmp_path / "data", tmp_path / "log"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(DATA)
    (folder / "b.parquet").write_bytes(DATA[::-1])
    (folder / "README.md").write_text(CARD)
    command = [
        sys.executable,
        "-m",
        "tests.servers",
        "hub",
        "--dir",
        str(folder),
        "--repo",
        "org/name",
    ]
    command += ["--copies", "3", "--latency-ms", "1", "--bandwidth-mb", "50", "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        files = f"{process.stdout.readline().strip()}/datasets/org/name/resolve/main"
        names = [f"data/train-{number:05d}-of-00003.parquet" for number in range(3)]
        bodies = [follow(f"{files}/{name}", authorization="Bearer hf_x").body for name in names]
        assert bodies == [DATA, DATA[::-1], DATA]
        assert ask(f"{files}/README.md").body.decode() == CARD
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [302, 200] * 3 + [200]
    assert "hf_x" not in log.read_text()
    assert "Signature=" not in log.read_text()
