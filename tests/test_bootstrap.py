"""A local file of text: what is in it, and that a kill at any moment does not show."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import ConfigError
from penstock.errors import SourceError
from penstock.tools.bootstrap import Progress, bootstrap
from tests import commands
from tests.corpus import texts
from tests.servers import FileServer, HubServer

ROOT = Path(__file__).parent.parent
EAGER = (
    "import sys; import penstock.tools.bootstrap as b; b.COMMIT_BYTES = 1; "
    "from penstock.cli.main import app; app(['bootstrap', *sys.argv[1:]])"
)
"""The command, with every chunk made safe by itself."""
DEADLINE_S = 60.0


def loop(documents: Iterable[str | None], goal: int = 1 << 60) -> bytes:
    """What the file should be, the plain way."""
    out = []
    size = 0
    for text in documents:
        if not text:
            continue
        line = (json.dumps({"text": text}, ensure_ascii=False) + "\n").encode()
        size += len(line)
        if size > goal:
            break
        out.append(line)
    return b"".join(out)


def documents(n: int, seed: int = 0, length: int = 300) -> list[str]:
    rng = random.Random(seed)
    alphabet = 'abcdefgh  \n\t\\"éß你🙂\x01\x7f\u2028'
    return ["".join(rng.choices(alphabet, k=rng.randrange(length))) for _ in range(n)]


def pages(n: int, size: int) -> list[str]:
    """Longer documents, made faster."""
    rng = random.Random(size)
    text = " ".join(documents(400))
    return [
        text[(at := rng.randrange(len(text) // 2)) : at + rng.randrange(size)] for _ in range(n)
    ]


def parquet(path: Path, column: list[str | None] | list[str], rows: int = 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"id": range(len(column)), "text": pa.array(column, pa.string())}),
        path,
        row_group_size=rows,
    )
    return path


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, list[str]]:
    """Three files of several row groups, with empty texts among them, and their documents in order."""
    parts = [documents(90, seed) for seed in range(3)]
    for number, part in enumerate(parts):
        parquet(tmp_path / "source" / f"{number}.parquet", part)
    return tmp_path / "source", [text for part in parts for text in part]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def leftovers(out: Path) -> list[str]:
    """What stands beside a finished file."""
    return sorted(p.name for p in out.parent.glob(f"{out.name}*"))


def command(*args: Any, code: str = EAGER) -> list[str]:
    return [sys.executable, "-c", code, *map(str, args)]


def run(*args: Any, code: str = EAGER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args, code=code), capture_output=True, text=True, timeout=DEADLINE_S
    )


def wait_for(what: Any, process: subprocess.Popen[Any] | None = None) -> None:
    until = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < until
        assert process is None or process.poll() is None
        time.sleep(0.002)


# What is in it


@pytest.mark.parametrize("goal", [2_000, 30_000, 1 << 40])
def test_the_file_is_that_of_a_plain_loop(
    goal: int, source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    done = bootstrap(source[0], tmp_path / "out.jsonl", goal)
    content = (tmp_path / "out.jsonl").read_bytes()
    assert content == loop(source[1], goal)
    assert (done.bytes, done.documents) == (len(content), content.count(b"\n"))
    assert done.exhausted == (goal == 1 << 40)
    assert not done.already
    assert leftovers(tmp_path / "out.jsonl") == [
        "out.jsonl",
        "out.jsonl.lock",
        "out.jsonl.progress.json",
    ]


@pytest.mark.parametrize("name", ["parquet", "docs.jsonl", "docs.jsonl.gz", "many"])
def test_every_format_can_be_the_source(name: str, corpus: Path, tmp_path: Path) -> None:
    bootstrap(corpus / name, tmp_path / "out.jsonl", 1 << 40)
    expected = (
        [text for i in range(24) for text in texts()[i::24]] if name == "many" else list(texts())
    )
    assert (tmp_path / "out.jsonl").read_bytes() == loop(expected)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_of_many_chunks_is_extended_from_the_middle_of_one(
    compressed: bool, tmp_path: Path
) -> None:
    column = pages(3_500, 3000)
    data = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in column).encode()
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(data, 1) if compressed else data)
    parquet(tmp_path / "b.parquet", ["after"])
    out = tmp_path / "out.jsonl"
    assert len(data) > (4 << 20) + 1_000_000
    for goal in (4_300_000, 1 << 40):
        bootstrap([path, tmp_path / "b.parquet"], out, goal, refresh=True)
        assert out.read_bytes() == loop([*column, "after"], goal)


def test_bad_records_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = ['{"text": "one"}', "no json", '{"text": 5}', '{"text": "two"}', '{"text": "three"}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 this is none PAR1")
    (tmp_path / "in" / "c.jsonl").write_text('{"text": "four"}\n')
    out = tmp_path / "out.jsonl"
    done = bootstrap(tmp_path / "in", out, 1000)
    assert out.read_bytes() == loop(["one", "two", "three", "four"])
    assert done.bad == {"invalid_json": 1, "not_a_string": 1, "corrupt": 1}


# Again


def test_a_refresh_gives_what_a_fresh_start_gives_wherever_the_last_one_stopped(
    source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    rng = random.Random(3)
    goal = 1000
    while True:
        done = bootstrap(source[0], out, goal, refresh=True)
        assert out.read_bytes() == loop(source[1], goal)
        if done.exhausted:
            break
        goal = done.bytes + rng.choice([1, 50, 1000, 9000])
    assert done.documents == len([text for text in source[1] if text])
    again = bootstrap(source[0], out, 1 << 40, refresh=True)
    assert again.already
    assert again.exhausted


# Kills

ZYGOTE = """
import json, os, signal, sys
import penstock.tools.bootstrap as b
b.COMMIT_BYTES = 1
source, folder, ending, goals = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
# Have everything imported that the children need, and no thread started.
import pyarrow, pyarrow.parquet, penstock.sources.text_files
pyarrow.array([""])
b.TextDataset(source, tokenizer="byte", seq_len=1)
STEPS = {"write", "fsync", "replace", "truncate", "unlink", "sendfile", "ftruncate"}

def child(out, goal, kill_at):
    # A process of its own, which dies in front of its n-th step.
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    seen = 0
    def watch(frame, event, what):
        nonlocal seen
        if event == "c_call" and what.__name__ in STEPS:
            seen += 1
            if seen == kill_at:
                if what.__name__ == "write" and str(getattr(what.__self__, "name", "")).endswith(".partial"):
                    os.write(what.__self__.fileno(), b'{"text": "half a li')  # as a kill within it leaves it
                os.kill(os.getpid(), signal.SIGKILL)
    if kill_at:
        sys.setprofile(watch)
    b.bootstrap(source, out, goal, refresh=len(goals) > 1)
    sys.setprofile(None)
    os._exit(0)

number = 0
while True:
    number += 1
    out = os.path.join(folder, f"{number}{ending}")
    for goal in goals[:-1]:
        assert child(out, goal, 0) == 0
    status = child(out, goals[-1], number)
    between = open(out, "rb").read() if os.path.exists(out) else None
    if status:
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        if number % 3 == 0:
            child(out, goals[-1], number // 2 + 1)  # and maybe killed again before it is through
        assert child(out, goals[-1], 0) == 0
    beside = sorted(name.removeprefix(str(number)) for name in os.listdir(folder) if name.startswith(f"{number}."))
    print(json.dumps([number, status, between and between.hex(), open(out, "rb").read().hex(), beside]), flush=True)
    if not status:
        break
"""


def killed_at_every_step(
    source: Path, folder: Path, ending: str, *goals: int
) -> list[tuple[bytes | None, bytes]]:
    """For each step: what readers found after the kill, and what there was in the end."""
    folder.mkdir()
    args = command(source, folder, ending, json.dumps(goals), code=ZYGOTE)
    done = subprocess.run(args, capture_output=True, text=True, timeout=3 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(
        result[4] == [ending, f"{ending}.lock", f"{ending}.progress.json"] for result in results
    ), results[0][4]
    return [
        (bytes.fromhex(r[2]) if r[2] is not None else None, bytes.fromhex(r[3])) for r in results
    ]


@pytest.mark.parametrize("goals", [(6000,), pytest.param((3000, 8000), marks=pytest.mark.slow)])
def test_a_kill_at_any_step_leaves_no_trace(
    goals: tuple[int, ...], source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The last goal is reached after kills; with two goals, by extending the first file."""
    results = killed_at_every_step(source[0], tmp_path / "out", ".jsonl", *goals)
    assert len(results) > 15
    old, new = loop(source[1], goals[0]) if len(goals) > 1 else None, loop(source[1], goals[-1])
    assert {between for between, _ in results} <= {old, new}
    assert {final for _, final in results} == {new}


# A full disk


@pytest.mark.parametrize("kib", [4, 32])
def test_a_full_disk_is_named_and_the_next_call_continues(
    kib: int, source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        out = disk / "out.jsonl"
        failed = run(source[0], "--out", out, "--bytes", "60kB", "-q")
        assert failed.returncode == 1
        assert "Traceback" not in failed.stderr
        assert "No space left on device" in failed.stderr
        assert str(out) in failed.stderr
        assert not out.exists()
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        bootstrap(source[0], out, 60_000)
        assert out.read_bytes() == loop(source[1], 60_000)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# Far away


def many(hub: HubServer, folder: Path, name: str = "org/name", files: int = 60) -> list[str]:
    """A repository of small files, and its documents in order."""
    column = documents(8 * files, 5)
    for i in range(files):
        parquet(folder / f"{i:03}.parquet", column[8 * i : 8 * i + 8], rows=4)
    hub.add(name, {f"data/{path.name}": path for path in sorted(folder.iterdir())})
    return column


def test_kills_again_and_again_while_it_comes_over_a_network(
    hub: HubServer, tmp_path: Path
) -> None:
    column = many(hub, tmp_path / "files")
    goal = len(loop(column)) - 1000
    out = tmp_path / "out.jsonl"
    hub.latency_s = 0.08
    sizes = []
    for kills in (1, 2):
        process = subprocess.Popen(
            command("hf://datasets/org/name", "--out", out, "--bytes", goal, "-q")
        )
        wait_for(lambda n=kills: saved(out)["bytes"] > goal * n // 4, process)
        process.kill()
        process.wait()
        sizes.append(saved(out)["bytes"])
    assert sizes[0] < sizes[1] < goal
    hub.latency_s = 0.0
    hub.clear_log()
    told: list[Progress] = []
    bootstrap("hf://datasets/org/name", out, goal, progress=told.append)
    assert out.read_bytes() == loop(column, goal)
    assert told[0].began == sizes[1]
    assert not any(
        "000.parquet" in request.path for request in hub.log
    )  # what was there is not fetched again


def saved(out: Path) -> dict[str, Any]:
    """How much of the partial file counts."""
    try:
        found: dict[str, Any] = json.loads(Path(f"{out}.progress.json").read_text())
        return found
    except FileNotFoundError:
        return {"bytes": 0}


def test_a_complete_file_asks_the_network_for_nothing(hub: HubServer, tmp_path: Path) -> None:
    column = many(hub, tmp_path / "files", "HuggingFaceFW/fineweb-edu", files=10)
    out = tmp_path / "out.jsonl"
    bootstrap("fineweb_edu", out, 5000)
    assert out.read_bytes() == loop(column, 5000)
    time.sleep(0.5)  # a request of the closed loader may still be under way
    hub.clear_log()
    assert bootstrap("fineweb_edu", out, 4000).already
    assert hub.log == []
    # Another name of the same data has to be looked up, and is the same.
    assert bootstrap("hf://datasets/HuggingFaceFW/fineweb-edu", out, 5000).already
    assert hub.log != []


def test_data_that_changed_is_refused_with_the_name_of_the_file(
    hub: HubServer, source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    repository = hub.add("org/name", {path.name: path for path in source[0].iterdir()})
    begun = repository.sha
    out = tmp_path / "out.jsonl"
    bootstrap("hf://datasets/org/name", out, 1000)
    repository.commit({"README.md": b"# other words, the same data"})
    bootstrap("hf://datasets/org/name", out, 1500, refresh=True)
    repository.commit({"1.parquet": parquet(tmp_path / "changed.parquet", ["changed"])})
    with pytest.raises(
        SourceError,
        match=r"1.parquet changed: it was \d+ bytes, ETag \w+, it is \d+ bytes, ETag \w+",
    ) as told:
        bootstrap("hf://datasets/org/name", out, 2000, refresh=True)
    assert begun in str(told.value)
    bootstrap(
        f"hf://datasets/org/name@{begun}", out, 2000, refresh=True
    )  # that commit is still there
    assert out.read_bytes() == loop(source[1], 2000)


def test_secrets_of_an_address_are_not_written_down(
    source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with FileServer({path.name: path for path in source[0].iterdir()}) as server:
        for signature in ("s3cret", "t0ken"):  # it may have expired in between
            url = f"{server.url_of('0.parquet')}?signature={signature}".replace(
                "//", "//user:passw0rd@"
            )
            done = bootstrap(url, out, 2000)
            assert done.already == (signature == "t0ken")
        with pytest.raises(SourceError):
            bootstrap(server.url_of("1.parquet"), out, 2000)
        # What a signature stands for has to be looked up: it may be something else by now.
        server.put("0.parquet", (source[0] / "1.parquet").read_bytes())
        with pytest.raises(SourceError):
            bootstrap(url, out, 2000)
    assert out.read_bytes() == loop(source[1], 2000)
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("out*"))
    assert not any(secret in kept for secret in (b"s3cret", b"t0ken", b"passw0rd"))


# Refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--out", "out.jsonl", "--bytes", "lots", "a.jsonl"), "--bytes = 'lots': must be"),
        (("--out", "out.jsonl", "--bytes", "5", "a.jsonl"), "does not fit into 5 bytes"),
        (("--out", "out.txt", "a.jsonl"), "ends in .jsonl"),
        (("--out", "out.jsonl", "--config", "x", "a.jsonl"), "config='x'"),
        (("--out", "out.jsonl", "empty.jsonl"), "hold no text"),
        (("--out", "unreadable.jsonl", "a.jsonl"), "cannot be read"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    args: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "unreadable.jsonl.partial").touch()
    (tmp_path / "unreadable.jsonl.progress.json").write_text('{"version": 3, "x": 1}')
    done = commands.run("bootstrap", *args)
    assert done.exit_code == 1
    assert message in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_of_somebody_else_is_not_touched(
    source: tuple[Path, list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ConfigError, match="bootstrap did not write it"):
        bootstrap(source[0], out, 1000)
    out.unlink()
    bootstrap(source[0], out, 1000)
    with open(out, "a") as file:
        file.write("mine\n")
    for goal in (1000, 2000):
        with pytest.raises(ConfigError, match="was changed: it had"):
            bootstrap(source[0], out, goal, refresh=True)
    assert out.read_bytes() == loop(source[1], 1000) + b"mine\n"


def test_a_second_process_on_one_file_is_refused(hub: HubServer, tmp_path: Path) -> None:
    column = many(hub, tmp_path / "files")
    out = tmp_path / "out.jsonl"
    hub.latency_s = 0.15
    process = subprocess.Popen(
        command("hf://datasets/org/name", "--out", out, "--bytes", "60kB", "-q")
    )
    try:
        wait_for(lambda: saved(out)["bytes"] > 0, process)
        with pytest.raises(ConfigError, match="is being written by another process"):
            bootstrap("hf://datasets/org/name", out, 60_000)
    finally:
        process.kill()
        process.wait()
    hub.latency_s = 0.0
    bootstrap("hf://datasets/org/name", out, 60_000)  # a dead one holds no lock
    assert out.read_bytes() == loop(column, 60_000)


# The command


def test_the_background_goes_on_by_itself(source: tuple[Path, list[str]], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    started = run(source[0], "--out", out, "--bytes", "5000", "--background")
    assert started.returncode == 0, started.stderr
    pid = int(started.stdout)
    assert str(pid) in started.stderr
    log = Path(f"{out}.log")
    wait_for(lambda: "wrote bytes" in log.read_text())
    assert log.read_text().splitlines()[-1] == f"wrote bytes: {len(loop(source[1], 5000))}"
    assert out.read_bytes() == loop(source[1], 5000)


def test_the_script_of_the_runbooks_works(hub: HubServer, tmp_path: Path) -> None:
    column = many(hub, tmp_path / "files", "HuggingFaceFW/fineweb-edu", files=10)
    out = tmp_path / "fwe_bootstrap.jsonl"
    words = f"scripts/automation/fwe_bootstrap.py --out {out} --bytes 5000".split()
    line = [sys.executable, *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == loop(column, 5000)
    assert done.stdout == f"wrote bytes: {out.stat().st_size}\n"
    again = run("fineweb_edu", "--out", out, "--bytes", "4KiB")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "complete already" in again.stderr
