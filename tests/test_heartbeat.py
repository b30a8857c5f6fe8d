"""The heartbeat: what it writes, on good disks and bad ones, and what readers make of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import AsyncDataLoader, TextDataset
from penstock.errors import ConfigError, SourceError
from penstock.watch.health import Limits
from penstock.watch.heartbeat import Heartbeat, encode
from penstock.watch.heartbeat_reader import (
    MAX_LINE_BYTES,
    Tail,
    decode,
    expand,
    parts,
    read_heartbeat,
)

LONG_S = 60.0
"""For what takes a moment on an idle machine."""


def until(true: Callable[[], Any], timeout: float = LONG_S) -> None:
    """Wait for another thread or process."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def line(step: int, msg: str = "progress", **fields: Any) -> bytes:
    first = {"ts": 1.79e9 + step, "iso": "2026-11-16T07:13:25.123Z", "mono": float(step)}
    return encode(first | {"pid": 7, "rank": 0, "step": step, "msg": msg} | fields)


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_heartbeat(path) if line["msg"] == "progress"]


def of(path: Path, msg: str) -> list[dict[str, Any]]:
    """Return the lines in the file so far; none if there is no file yet."""
    return [line for line in Tail(path).poll(end=True) if line["msg"] == msg]


def skipped(path: Path) -> int:
    tail = Tail(path)
    list(tail.poll(end=True))
    return tail.skipped


def logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


# The contract: events and their fields

GOLDEN = json.loads((Path(__file__).parent / "data" / "heartbeat_events.json").read_text())
"""Events and fields that other programs read. `fallback` and `steady_state` have tests of their own."""


def test_every_event_has_its_documented_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "some text"}\n' * 200)
    (tmp_path / "in" / "b.jsonl").write_text("broken\n")
    data = TextDataset(tmp_path / "in", tokenizer="byte", seq_len=32, cache=False)
    loader = AsyncDataLoader(data, 2, epochs=1)
    loader.telemetry.stall_s = 1e-9
    monkeypatch.setattr("penstock.watch.telemetry.FIRST_STALL_S", 1e-9)
    heart = Heartbeat(
        tmp_path, observed=loader.telemetry, prefix="fineweb_loader_", every_s=0.01, limits=Limits()
    )
    next(loader)
    with heart, loader:
        loader.warmup(1, timeout=LONG_S)
        with suppress(SourceError):
            for step, _ in enumerate(loader, 1):
                heart.progress(step, loss=math.nan if step == 2 else 1.0, grad_norm=0.5)
                with loader.pause("eval"):
                    until(lambda: of(heart.path, "beat"))
    found: dict[str, set[str]] = {}
    for line in read_heartbeat(heart.path):
        assert list(line)[:7] == GOLDEN["every line"]
        found.setdefault(line["msg"], set()).update(line)
        found.setdefault("parts", set()).update(line.get("parts", {}))
    for msg, fields in GOLDEN.items():
        if msg != "every line":
            assert set(fields) <= found[msg], msg


# What is written


def test_the_loaders_fields_and_events_are_in_the_lines(tmp_path: Path) -> None:
    class Loader:
        events: ClassVar = [
            (1.79e9, 5.0, "loader_ready", {"dt": 0.5}),
            (1.79e9, 6.0, "stall", {"stage": "fetch"}),
        ]

        def step_fields(self) -> dict[str, Any]:
            return {"tokens": 64, "data_wait_pct": 2.5, "wait_by_stage": {"fetch": 0.01}}

        def beat_fields(self) -> dict[str, Any]:
            return {"verdict": "not input-bound", "stages": {"fetch": {"busy_s": 1.0}}}

        def take_events(self) -> list[tuple[float, float, str, dict[str, Any]]]:
            events, self.events = self.events, []
            return events

    with Heartbeat(tmp_path, observed=Loader(), prefix="fineweb_loader_", every_s=0.01) as heart:
        heart.progress(1, loss=2.0)
        heart.event("loader_warmup", filled=4)
        until(lambda: of(heart.path, "beat"))
    beats = read_heartbeat(heart.path)
    assert of(heart.path, "fineweb_loader_ready")[0]["mono"] == 5.0
    assert of(heart.path, "stall")[0]["stage"] == "fetch"
    assert of(heart.path, "fineweb_loader_warmup")[0]["filled"] == 4
    progress = of(heart.path, "progress")[0]
    assert (progress["tokens"], progress["wait_by_stage"]) == (64, {"fetch": 0.01})
    beat = of(heart.path, "beat")[-1]
    assert (beat["verdict"], beat["dropped"]) == ("not input-bound", 0)
    assert beats[-1]["stages"] == {"fetch": {"busy_s": 1.0}}
    assert beats[-1]["data_wait_pct"] == 2.5


def test_it_beats_while_a_step_is_stuck(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, every_s=0.02) as heart:
        heart.progress(1)
        until(lambda: sum(beat["step"] == 1 for beat in of(heart.path, "beat")) >= 5)
    waits = [line["since_step_s"] for line in of(heart.path, "beat") if line["step"] == 1]
    assert waits == sorted(waits)
    assert len(set(waits)) > 1


@pytest.mark.parametrize(
    ("loss", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_a_loss_that_is_not_finite_is_a_word_and_other_such_numbers_are_left_out(
    tmp_path: Path, loss: float, word: str
) -> None:
    seen: list[dict[str, float]] = []
    with Heartbeat(tmp_path, on_metrics=[lambda step, values: seen.append(values)]) as heart:
        heart.progress(1, loss=loss, grad_norm=loss, nested={"bad": loss, "good": 1.5})
    (progress,) = of(heart.path, "progress")
    assert progress["loss"] == word
    assert "grad_norm" not in progress
    assert progress["nested"] == {"good": 1.5}
    assert str(seen[0]["loss"]) == word
    assert seen[0]["nested/good"] == 1.5
    assert "NaN" not in heart.path.read_text()


def test_the_gate_writes_its_verdict_into_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Heartbeat(tmp_path, limits=Limits()) as heart:
        heart.progress(1, loss=1.0)
        heart.progress(2, loss=math.nan)
        heart.progress(3, loss=1.0)
    verdicts = of(heart.path, "health")
    assert [(line["step"], line["status"], line["grace"]) for line in verdicts] == [
        (2, "fail", True),
        (3, "ok", True),
    ]
    assert "loss is nan since step 2" in verdicts[0]["reasons"][0]
    assert logged(caplog, "health: fail at step 2") == 1


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"rank": -1}, {"every_s": 0}, {"max_bytes": 10}, {"keep": 0}, {"queue": 0}, {"prefix": "other_"},
        {"rank": 2, "world_size": 2},
    ]  # fmt: skip
    for some in wrong:
        with pytest.raises(ConfigError):
            Heartbeat(tmp_path, **some)


# Rotation


def test_a_large_file_is_rotated_and_read_as_one(tmp_path: Path) -> None:
    tailed: list[int] = []

    def poll() -> None:
        tailed.extend(line["step"] for line in tail.poll() if line["msg"] == "progress")

    with Heartbeat(tmp_path, max_bytes=4096, keep=50) as heart:
        tail = Tail(heart.path)
        for step in range(1, 201):
            heart.progress(step, loss=1.0)
            poll()
    poll()
    assert tailed == steps(heart.path) == list(range(1, 201))
    assert len(parts(heart.path)) > 5
    for part in parts(heart.path)[1:]:
        first = json.loads(part.read_bytes().splitlines()[0])
        assert (first["msg"], first["rotated"]) == ("boot", True)
        assert part.stat().st_size < 2 * 4096


# Bad disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_lines_and_nothing_else(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(48 * 1024))
    with Heartbeat(small_disk, every_s=0.2) as heart:
        for step in range(1, 61):  # more than fits beside the filler, less than fits without it
            heart.progress(step, loss=1.0, text="x" * 500)
        until(lambda: heart.counts()["disk_failures"] > 0)
        until(lambda: heart.counts()["dropped"] > 0)
        filler.unlink()
        heart.progress(1000)
        until(lambda: any(line["step"] == 1000 for line in of(heart.path, "progress")))
        until(lambda: any(beat["dropped"] > 0 for beat in of(heart.path, "beat")))
    assert of(heart.path, "shutdown")
    assert steps(heart.path) == sorted(set(steps(heart.path)))
    assert skipped(heart.path) <= 1  # the line that the full disk has cut
    assert logged(caplog, "cannot be written") == 1


WRITER = """
import sys, time
from penstock.watch.heartbeat import Heartbeat
heart = Heartbeat(sys.argv[1], queue=100_000).start()
step = 0
while True:
    step += 1
    heart.progress(step, loss=1.0, text="x" * 3000)
    if step % 200 == 0: time.sleep(0.05)
"""


def test_a_killed_process_leaves_at_most_one_torn_line_and_the_next_one_goes_on_cleanly(
    tmp_path: Path,
) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    kills = 4
    for n in range(kills):
        size = path.stat().st_size if path.exists() else 0
        child = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path])
        until(
            lambda size=size, n=n: (
                path.exists() and path.stat().st_size > size + 100_000 + 7_919 * n
            )
        )
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=LONG_S)
    with path.open("ab") as file:
        file.write(line(5)[:40])  # a kill that certainly came in the middle
    with Heartbeat(tmp_path) as heart:
        heart.progress(1)
    beats = read_heartbeat(path)
    assert len(beats)
    assert 1 <= skipped(path) <= kills + 1
    runs: dict[int, list[int]] = {}
    for record in beats:
        if record["msg"] == "progress":
            runs.setdefault(record["pid"], []).append(record["step"])
    assert len(runs) == kills + 1
    assert all(run == list(range(1, len(run) + 1)) for run in runs.values())
    assert of(path, "shutdown")
    assert beats[-1]["pid"] == os.getpid()


# The end


def test_a_process_that_ends_without_close_still_writes_shutdown(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.watch.heartbeat import Heartbeat\n"
        "heart = Heartbeat(sys.argv[1]).start(); heart.progress(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "heartbeat_rank0.jsonl"
    assert steps(path) == [1]
    assert [line["reason"] for line in of(path, "shutdown")] == ["not closed"]


# Reading


def test_what_is_not_a_line_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    long = b'{"text": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n'
    torn = line(9)[:50]
    path.write_bytes(
        line(1)
        + torn
        + b"\n\n"
        + b'{"step": 1}\n'
        + long
        + b"\xff\xfe\n"
        + b"[1]\n"
        + line(2)
        + torn
    )
    assert steps(path) == [1, 2]
    assert skipped(path) == 6


def test_files_are_found_by_name_glob_and_folder(tmp_path: Path) -> None:
    names = [f"heartbeat_rank{rank}.jsonl" for rank in (0, 2, 10)]
    for name in (*names, "heartbeat_rank0.jsonl.1", "other.jsonl", "heartbeat_rank2.jsonl.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "heartbeat_rank11.jsonl.1").touch()  # between a rename and the new file
    wanted = [tmp_path / name for name in (*names, "heartbeat_rank11.jsonl")]
    assert [path for path in expand([tmp_path]) if path.suffix == ".jsonl"] == wanted
    assert expand([tmp_path / "heartbeat*.jsonl"]) == wanted[:3]
    assert (
        expand([wanted[0], f"{wanted[0]}.1", tmp_path / "nothing.jsonl", tmp_path / "*.none"])
        == wanted[:1]
    )
    odd = tmp_path / "run[1]"
    odd.mkdir()
    (odd / names[0]).touch()
    assert expand([odd / names[0]]) == [odd / names[0]]


def test_a_tail_waits_for_the_file_for_the_rest_of_a_line_and_begins_again_after_a_truncation(
    tmp_path: Path,
) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"

    def append(data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    tail = Tail(path)
    polled = lambda: [line["step"] for line in tail.poll()]  # noqa: E731
    assert polled() == []
    append(line(1) + line(2)[:30])
    assert polled() == [1]
    assert polled() == []
    append(line(2)[30:])
    assert polled() == [2]
    path.write_bytes(line(3))
    assert polled() == [3]
    path.unlink()
    assert polled() == []
    append(line(4))
    assert polled() == [4]
    for step in range(5, 8):
        path.rename(f"{path}.{8 - step}")
        append(line(step))
    assert polled() == [5, 6, 7]
    append(line(8)[:30])
    assert polled() == []
    path.rename(f"{path}.1")
    append(line(9))
    assert polled() == [9]
    assert tail.skipped == 1


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=8), anything, max_size=5))
def test_whatever_is_written_can_be_read(fields: dict[str, Any]) -> None:
    first = {"ts": 1.5, "iso": "", "mono": 2.5, "pid": 1, "rank": 0, "step": 3, "msg": "progress"}
    found = decode(encode(fields | first))
    assert found is not None
    assert found | first == found
    for name, value in fields.items():
        if name not in first and type(value) in (str, bool, type(None)):
            assert found[name] == value
