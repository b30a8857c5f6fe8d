"""The loopback servers do what they say: every endpoint and every fault, as a client sees it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.servers import HubServer

ROOT = Path(__file__).parent.parent

DATA = bytes(range(256)) * 40


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
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
            environment[name] = "1"
        command = [sys.executable, "-c", CLIENTS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        fetched = [request for request in hub.log if request.port == "cdn"]
        assert any(request.range for request in fetched)
        assert not any("authorization" in request.headers for request in fetched)
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


def get(url: str) -> bytes:
    asked = urllib.request.Request(url, headers={"Authorization": "Bearer hf_x"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return bytes(answer.read())


def test_a_hub_runs_as_a_process_of_its_own_and_leaves_a_log_without_secrets(
    tmp_path: Path,
) -> None:
    folder, log = tmp_path / "data", tmp_path / "log"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(DATA)
    (folder / "b.parquet").write_bytes(DATA[::-1])
    (folder / "README.md").write_text(CARD)
    command = [sys.executable, "-m", "tests.servers", "hub", "--dir", str(folder)]
    command += [
        "--repo",
        "org/name",
        "--copies",
        "3",
        "--latency-ms",
        "1",
        "--bandwidth-mb",
        "50",
        "--log",
        str(log),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        files = f"{process.stdout.readline().strip()}/datasets/org/name/resolve/main"
        names = [f"data/train-{number:05d}-of-00003.parquet" for number in range(3)]
        bodies = [get(f"{files}/{name}") for name in [*names, "README.md"]]
        assert bodies == [DATA, DATA[::-1], DATA, CARD.encode()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [302, 200] * 3 + [200]
    assert "hf_x" not in log.read_text()
    assert "Signature=" not in log.read_text()
