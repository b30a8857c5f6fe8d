"""`penstock smoke`: the first batch as a run gets it, or one line that says why there is none."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.tools.data_choice import DataOptions, choose_data
from tests import commands
from tests.corpus import texts
from tests.servers import Fault, HubServer

ROOT = Path(__file__).parent.parent
RUNBOOK = ("--seq-len", "1024", "--batch", "1", "--timeout", "60", "--tokenizer", "byte")
MILESTONES = ["import", "list", "open", "first bytes", "first tokens", "first batch"]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts()) * 4}), sink, row_group_size=20)
    with HubServer() as server:
        server.add(
            "HuggingFaceFW/fineweb-edu", {f"data/{i}.parquet": sink.getvalue() for i in range(3)}
        )
        yield server


@pytest.fixture
def own_environment(tmp_path: Path) -> dict[str, str]:
    """An environment without settings, and with its own cache."""
    prefixes = ("PENSTOCK_", "NSA_FWE_", "HF_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return clean | {"PENSTOCK_CACHE": str(tmp_path / "cache")}


def script(*args: Any, env: dict[str, str], options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    line = [sys.executable, *options, "scripts/automation/fwe_smoke.py", *map(str, args)]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def run(*args: Any, **env: str) -> tuple[int, str, str]:
    """The same in this process."""
    return commands.run("smoke", *args, **env)


def passed(done: tuple[int, str, str]) -> dict[str, str]:
    """Return the lines of a success, by their first word."""
    code, out, err = done
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert re.fullmatch(r"\[smoke\]\[OK\] first batch in \d+\.\d\ds", first)
    return dict(re.findall(r"^([a-z]+) +(.+)$", "\n".join(rest), re.MULTILINE))


def failed(done: tuple[int, str, str]) -> str:
    """Return the one line of a failure."""
    code, out, err = done
    assert (code, out) == (2, "")
    line, *more = err.splitlines()
    assert not more
    assert line.startswith("[smoke][FAIL] ")
    return line


# Success


@pytest.mark.parametrize("way", ["as it stands", "PYTHONPATH=.", "not installed"])
def test_runbook_script_gets_the_first_batch(
    way: str, hub: HubServer, own_environment: dict[str, str]
) -> None:
    options = ("-S",) if way == "not installed" else ()  # without what a .pth file adds
    path = {"not installed": str(Path(pa.__file__).parent.parent), "PYTHONPATH=.": "."}.get(way, "")
    env = own_environment | {"HF_ENDPOINT": hub.endpoint, "PYTHONPATH": path}
    seen = passed(script(*RUNBOOK, env=env, options=options))
    assert seen["data"].startswith("fineweb_edu: TextDataset(3 files, ")
    assert seen["batch"] == "1 x 1024 int64, 1,024 tokens"
    assert re.fullmatch(r"[0-8] ready, prefetch keeps 8", seen["queue"])
    assert any("data/0.parquet" in request.path for request in hub.log)


def test_startup_times_are_printed_in_order(hub: HubServer, tmp_path: Path) -> None:
    done = run(*RUNBOOK, HF_ENDPOINT=hub.endpoint, PENSTOCK_CACHE=str(tmp_path))
    seen = passed(done)
    found = re.findall(r"^  ([a-z ]+?) +(\d+\.\d{3})$", done[1], re.MULTILINE)
    assert [name for name, _ in found] == MILESTONES
    times = [float(seconds) for _, seconds in found]
    assert times == sorted(times)
    assert re.search(r"\blist \d", seen["spent"])


def test_command_line_overrides_environment(hub: HubServer) -> None:
    env = {
        "HF_ENDPOINT": hub.endpoint,
        "NSA_FWE_Q": "3",
        "NSA_FWE_WARMUP_BATCHES": "5",
        "PENSTOCK_BATCH_SIZE": "2",
    }
    seen = passed(run("--seq-len", 64, **env))
    assert seen["batch"] == "2 x 64 int64, 128 tokens"
    assert seen["warmup"].startswith("5 of 5 batches in ")
    assert seen["queue"].endswith(" ready, prefetch keeps 3")
    options = ("--batch", 4, "--set", "prefetch_size=2", "--set", "warmup_batches=0")
    seen = passed(run("--seq-len", 64, *options, **env))
    assert seen["batch"] == "4 x 64 int64, 256 tokens"
    assert "warmup" not in seen
    assert seen["queue"].endswith(" ready, prefetch keeps 2")


def test_without_prefetch_there_is_no_queue(hub: HubServer) -> None:
    seen = passed(run("--seq-len", 64, HF_ENDPOINT=hub.endpoint, NSA_FWE_PREFETCH="0"))
    assert seen["queue"] == "none: prefetch is off"


def test_local_data_needs_no_network(corpus: Path, tmp_path: Path) -> None:
    bootstrap = tmp_path / "fwe_bootstrap.jsonl"
    bootstrap.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts() if text))
    env = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    local = passed(run("--dataset", "fineweb_edu_local", "--local-path", bootstrap, **env))
    assert local["data"].startswith(f"fineweb_edu_local {bootstrap}: TextDataset(1 file, ")
    seen = passed(run("--local-path", bootstrap, "--seq-len", 8, **env))
    assert seen["batch"] == "1 x 8 int64, 8 tokens"
    tokenizer = ("--tokenizer", corpus / "tokenizer.json")
    made = passed(run("--dataset", "synthetic", *tokenizer, **env))
    assert "SyntheticDataset(vocab_size=400, seq_len=1024" in made["data"]
    folder = passed(run("--dataset", corpus / "parquet", *tokenizer, **env))
    assert "TextDataset(2 files, " in folder["data"]


def test_settings_file_names_the_data_and_options_override_it(corpus: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[loader]\nbatch_size = 3\nprefetch_size = 5\n[data]\nkind = "text"\n'
        f'urls = "{corpus}/parquet"\ntokenizer = "byte"\nseq_len = 32\n'
    )
    seen = passed(run("--config", config))
    assert seen["batch"] == "3 x 32 int64, 96 tokens"
    assert seen["queue"].endswith(" ready, prefetch keeps 5")
    seen = passed(run("--config", config, "--seq-len", 16))
    assert seen["batch"] == "3 x 16 int64, 48 tokens"
    seen = passed(run("--config", config, "--dataset", corpus / "docs.jsonl"))
    assert seen["batch"] == "3 x 1024 int64, 3,072 tokens"


# Failure


def test_hanging_listing_ends_at_the_limit_and_names_the_server(
    hub: HubServer, own_environment: dict[str, str]
) -> None:
    hub.fault(Fault("silence", path="/api/*", method="*", times=None))
    env = own_environment | {"HF_ENDPOINT": hub.endpoint}
    # A listing alone may take 60 s.
    line = failed(script("--timeout", "2", env=env))
    assert re.search(r" \(after \d+\.\d s\)$", line)
    assert "no first batch within 2 s: still listing the files" in line
    assert "Check that the server can be reached (HF_ENDPOINT, proxies), or allow more" in line


@pytest.mark.parametrize("prefetch", ["1", "0"])
def test_hanging_file_ends_at_the_limit_and_names_stage_and_file(
    prefetch: str, hub: HubServer, own_environment: dict[str, str]
) -> None:
    hub.fault(Fault("silence", path="*.parquet", method="*", times=None))
    more = {
        "HF_ENDPOINT": hub.endpoint,
        "NSA_FWE_PREFETCH": prefetch,
        "NSA_FWE_WARMUP_BATCHES": "4",
        "NSA_FWE_WARMUP_TIMEOUT": "90",  # longer than the limit
    }
    line = failed(script("--timeout", "4", env=own_environment | more))
    assert "no first batch within 4 s: the data was opened, then waiting for " in line
    assert re.search(r"waiting for \w+, hf://datasets/.*\.parquet.*\. Check that ", line)


def test_refused_connection_is_reported(own_environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    line = failed(script("--timeout", "4", env=own_environment | {"HF_ENDPOINT": endpoint}))
    assert "Check that the server can be reached" in line
    assert "(last message: hf://datasets/HuggingFaceFW/fineweb-edu@main: Connection refused" in line


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--timeout", "0"), "--timeout = '0': must be"),
        (("--dataset", "nowhere"), "nowhere does not exist"),
        (("--dataset", "fineweb_edu_local"), "needs --local-path FILE"),
        (("--dataset", "stdlib", "--local-path", "x"), "only for --dataset fineweb_edu_local"),
        (("--set", "prefetch_sise=3"), "did you mean prefetch_size?"),
        (("--batch", "2", "--set", "batch_size=3"), "give only one"),
        (("--config", "configs/test_async_loader.toml", "--tokenizer", "byte"), "kind synthetic"),
    ],
)
def test_invalid_arguments_are_one_line(args: tuple[str, ...], why: str) -> None:
    assert why in failed(run(*args))


def test_secrets_of_an_address_are_not_printed() -> None:
    choice = choose_data(DataOptions(), "https://bob:PASSWD@host:81/a.jsonl?sig=SECRET@x")
    assert choice.name == "https://host:81/a.jsonl"
