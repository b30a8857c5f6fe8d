"""The stand-in for the Hub serves the clients that people use: huggingface_hub and datasets."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.servers import HubServer

CARD = "---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n# A dataset\n"
FILES = {"data/a.parquet": b"data", "data/deep/b.jsonl": b"{}\n", "c.txt": b"text"}


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
