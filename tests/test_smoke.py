"""The smoke test: the first batch as a run gets it, or one line that says why there is none."""

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

from penstock import ConfigError
from penstock.errors import NoData
from penstock.testing import Fault, HubServer
from penstock.verify.choice import choose
from penstock.verify.smoke import smoke
from tests.corpus import texts

ROOT = Path(__file__).parent.parent
RUNBOOK = ("--seq-len", "1024", "--batch", "1", "--timeout", "60", "--tokenizer", "byte")
ENTRIES = ["import", "list", "open", "first bytes", "first tokens", "first row", "first batch"]


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
def place(tmp_path: Path) -> dict[str, str]:
    """An environment without settings, and with a cache of its own."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PENSTOCK_", "NSA_FWE_", "HF_"))
    }
    return clean | {"PENSTOCK_CACHE": str(tmp_path / "cache")}


def script(
    *args: Any, env: dict[str, str], options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *options, "scripts/automation/fwe_smoke.py", *map(str, args)]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


def passed(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The lines of a success, by their first word."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"\[smoke\]\[OK\] first batch in \d+\.\d\ds", first)
    return dict(re.findall(r"^([a-z]+) +(.+)$", "\n".join(rest), re.MULTILINE))


def failed(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a failure."""
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    line, *more = done.stderr.splitlines()
    assert not more
    assert line.startswith("[smoke][FAIL] ")
    return line


# It is there


@pytest.mark.parametrize("way", ["as it stands", "PYTHONPATH=.", "not installed"])
def test_the_script_of_the_runbooks_works(way: str, hub: HubServer, place: dict[str, str]) -> None:
    options = ("-S",) if way == "not installed" else ()  # without what a .pth file adds
    path = {"not installed": str(Path(pa.__file__).parent.parent), "PYTHONPATH=.": "."}.get(way, "")
    env = place | {"HF_ENDPOINT": hub.endpoint, "PYTHONPATH": path}
    seen = passed(script(*RUNBOOK, env=env, options=options))
    assert seen["data"].startswith("fineweb_edu: TextDataset(3 files, ")
    assert seen["batch"] == "1 x 1024 int64, 1,024 tokens"
    assert re.fullmatch(r"[0-8] ready behind it; prefetch keeps 8", seen["queue"])
    assert any("data/0.parquet" in request.path for request in hub.log)


def test_the_ledger_of_the_start_is_printed_in_its_order(
    hub: HubServer, place: dict[str, str]
) -> None:
    done = script(*RUNBOOK, env=place | {"HF_ENDPOINT": hub.endpoint})
    seen = passed(done)
    assert seen["ledger"] == "seconds since the process began"
    entries = re.findall(r"^  ([a-z ]+?) +(\d+\.\d{3})$", done.stdout, re.MULTILINE)
    assert [name for name, _ in entries] == ENTRIES
    times = [float(seconds) for _, seconds in entries]
    assert times == sorted(times)
    assert times[0] > 0
    assert re.search(r"\blist \d", seen["spent"])


def test_settings_come_from_the_environment_and_the_command_line_goes_first(
    hub: HubServer, place: dict[str, str]
) -> None:
    env = place | {
        "HF_ENDPOINT": hub.endpoint,
        "NSA_FWE_Q": "3",
        "NSA_FWE_WARMUP_BATCHES": "5",
        "PENSTOCK_BATCH_SIZE": "2",
    }
    seen = passed(script("--seq-len", 64, env=env))
    assert seen["batch"] == "2 x 64 int64, 128 tokens"
    assert seen["warmup"].startswith("5 of 5 batches in ")
    assert seen["queue"].endswith(" ready behind it; prefetch keeps 3")
    seen = passed(
        script(
            "--seq-len",
            64,
            "--batch",
            4,
            "--set",
            "prefetch_size=2",
            "--set",
            "warmup_batches=0",
            env=env,
        )
    )
    assert seen["batch"] == "4 x 64 int64, 256 tokens"
    assert "warmup" not in seen
    assert seen["queue"].endswith(" ready behind it; prefetch keeps 2")


def test_without_prefetch_there_is_a_batch_and_no_queue(
    hub: HubServer, place: dict[str, str]
) -> None:
    seen = passed(
        script("--seq-len", 64, env=place | {"HF_ENDPOINT": hub.endpoint, "NSA_FWE_PREFETCH": "0"})
    )
    assert seen["queue"] == "none: prefetch is off"


@pytest.mark.slow
def test_data_that_needs_no_network(corpus: Path, place: dict[str, str], tmp_path: Path) -> None:
    bootstrap = tmp_path / "fwe_bootstrap.jsonl"
    bootstrap.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts() if text))
    env = place | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    local = script("--dataset", "fineweb_edu_local", "--local-path", bootstrap, *RUNBOOK, env=env)
    assert (
        f"fineweb_edu_local {bootstrap}: TextDataset(1 files, {bootstrap.stat().st_size} bytes"
        in local.stdout
    )
    assert passed(local)["batch"] == "1 x 1024 int64, 1,024 tokens"
    assert (
        passed(script("--local-path", bootstrap, "--seq-len", 8, env=env))["batch"]
        == "1 x 8 int64, 8 tokens"
    )
    made = passed(
        script("--dataset", "synthetic", "--tokenizer", corpus / "tokenizer.json", env=env)
    )
    assert "SyntheticDataset(vocab_size=400, seq_len=1024" in made["data"]
    assert passed(script("--dataset", "stdlib", env=env))["data"].startswith(
        "stdlib: TextDataset(1 files, "
    )
    folder = passed(
        script("--dataset", corpus / "parquet", "--tokenizer", corpus / "tokenizer.json", env=env)
    )
    assert "TextDataset(2 files, " in folder["data"]


def test_a_settings_file_names_the_data_and_the_command_line_goes_first(
    corpus: Path, place: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[loader]\nbatch_size = 3\nprefetch_size = 5\n[data]\nkind = "text"\nurls = "{corpus}/parquet"\n'
        'tokenizer = "byte"\nseq_len = 32\n'
    )
    seen = passed(script("--config", config, env=place))
    assert seen["batch"] == "3 x 32 int64, 96 tokens"
    assert seen["queue"].endswith(" ready behind it; prefetch keeps 5")
    assert (
        passed(script("--config", config, "--seq-len", 16, env=place))["batch"]
        == "3 x 16 int64, 48 tokens"
    )
    other = passed(script("--config", config, "--dataset", corpus / "docs.jsonl", env=place))
    assert other["batch"] == "3 x 1024 int64, 3,072 tokens"


def test_every_example_configuration_starts(place: dict[str, str]) -> None:
    for config in sorted((ROOT / "configs").iterdir()):
        assert passed(script("--config", config, env=place))["batch"]


def test_nothing_is_left_running_afterwards(corpus: Path) -> None:
    for overrides in ({}, {"prefetch": "off"}):
        choice = choose(str(corpus / "parquet"), overrides=overrides, seq_len=16)
        seen = smoke(choice, 60)
        assert seen.shape == (1, 16)
        assert seen.first_batch_s > 0
        assert list(seen.ledger) == [name.replace(" ", "_") for name in ENTRIES]
    # and the fixture of all tests looks for threads


def test_a_launchers_ranks_are_none_of_its_business(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert smoke(choose(str(corpus / "docs.jsonl.gz"), seq_len=16), 60).shape == (1, 16)


# It is not


@pytest.mark.parametrize("prefetch", ["1", "0"])
def test_a_listing_that_hangs_ends_with_the_time_and_names_the_server(
    prefetch: str, hub: HubServer, place: dict[str, str]
) -> None:
    hub.fault(Fault("silence", path="/api/*", method="*", times=None))
    env = place | {"HF_ENDPOINT": hub.endpoint, "NSA_FWE_PREFETCH": prefetch}
    # A listing has a budget of 60 s of its own.
    line = failed(script("--timeout", "2", env=env))
    assert re.search(r"fineweb_edu, after \d+\.\d s: ", line)
    assert "no first batch within 2 s: it is still being opened" in line
    assert f"See that {hub.endpoint} can be reached, or allow more with --timeout" in line


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["1", "0"])
def test_bytes_that_hang_end_with_the_time_and_name_stage_and_file(
    prefetch: str, hub: HubServer, place: dict[str, str]
) -> None:
    hub.fault(Fault("silence", path="*.parquet", method="*", times=None))
    # With a warmup that would wait longer than there is time.
    more = {
        "NSA_FWE_PREFETCH": prefetch,
        "NSA_FWE_WARMUP_BATCHES": "4",
        "NSA_FWE_WARMUP_TIMEOUT": "90",
    }
    line = failed(script("--timeout", "8", env=place | {"HF_ENDPOINT": hub.endpoint} | more))
    assert (
        "no first batch within 8 s: it was opened, and the longest wait was for fetch of hf://datasets/"
        in line
    )
    assert "/data/0.parquet. See that " in line


def test_a_refused_address_says_so(place: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    line = failed(script("--timeout", "5", env=place | {"HF_ENDPOINT": endpoint}))
    assert f"See that {endpoint} can be reached" in line
    assert "Last heard: hf://datasets/HuggingFaceFW/fineweb-edu@main: Connection refused" in line


def test_what_the_hub_does_not_have_is_no_matter_of_time(
    hub: HubServer, place: dict[str, str]
) -> None:
    line = failed(
        script(
            "--dataset", "hf://datasets/nobody/nothing", env=place | {"HF_ENDPOINT": hub.endpoint}
        )
    )
    assert "nobody/nothing" in line
    assert "no first batch within" not in line


def test_a_damaged_file_is_named_with_its_stage(
    corpus: Path, place: dict[str, str], tmp_path: Path
) -> None:
    whole = (corpus / "parquet" / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:200] + bytes(400) + whole[600:])
    line = failed(script("--dataset", tmp_path / "a.parquet", env=place))
    assert "a.parquet" in line
    assert re.search(r"\(in stage .*decode.*row group 0\)$", line)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--timeout", "0"), "--timeout 0: needs seconds"),
        (("--dataset", "nowhere"), "nowhere does not exist"),
        (("--dataset", "fineweb_edu_local"), "needs --local-path FILE"),
        (
            ("--dataset", "stdlib", "--local-path", "x.jsonl"),
            "goes with --dataset fineweb_edu_local",
        ),
        (
            ("--dataset", "stdlib", "--set", "prefetch_sise=3"),
            "did you mean prefetch_size?",
        ),
        (("--dataset", "stdlib", "--batch", "2", "--set", "batch_size=3"), "keep one of them"),
        (
            ("--config", "configs/test_async_loader.toml", "--tokenizer", "byte"),
            "is of kind synthetic",
        ),
    ],
)
def test_arguments_that_do_not_fit_fail_in_one_line(
    args: tuple[str, ...], why: str, place: dict[str, str]
) -> None:
    assert why in failed(script(*args, env=place))


@pytest.mark.parametrize("prefetch", [True, False])
def test_data_of_less_than_a_batch_says_so(prefetch: bool, corpus: Path) -> None:
    choice = choose(
        str(corpus / "parquet"),
        overrides={"epochs": 1, "drop_last": True, "batch_size": 8, "prefetch": prefetch},
        seq_len=20_000,
    )
    with pytest.raises(NoData, match="the stream ended without a batch"):
        smoke(choice, 60)


def test_a_mixture_is_changed_in_its_file(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\nkind = "synthetic"\nseq_len = 8\n[data.mixture.a]\nweight = 1\n[data.mixture.b]\nweight = 2\nseed = 1\n'
    )
    assert smoke(choose(config=config), 60).shape == (1, 8)
    with pytest.raises(
        ConfigError, match=r"--seq-len: file .*run\.toml \[data\] is of kind mixture"
    ):
        choose(config=config, seq_len=16)
    with pytest.raises(ConfigError, match="no data"):
        choose()
