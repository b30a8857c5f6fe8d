"""Traces: what was done is drawn, by the rules of the format, and on the profiler's axis."""

from __future__ import annotations

import gzip
import json
import logging
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from penstock import AsyncDataLoader, TextDataset
from penstock.cli.trace import trace as trace_command
from penstock.encode.tokenizer import Tokenizer
from penstock.errors import ConfigError, CorruptFile, NoData
from penstock.watch.stage_timer import STAGES
from penstock.watch.trace import Recorder, merge
from tests.servers import HubServer

STEPS = 30
Events = list[dict[str, Any]]


def nothing_else(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(), parse_constant=nothing_else)
    return found


def make(corpus: Path, **how: Any) -> AsyncDataLoader:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=32)
    return AsyncDataLoader(data, 4, **how)


def train(loader: AsyncDataLoader, recorder: Recorder, steps: int = STEPS) -> None:
    for _ in range(steps):
        next(loader)
        recorder.sample()
        threading.Event().wait(0.002)


def recorded(loader: AsyncDataLoader, path: Path, **how: Any) -> Events:
    """What a run of some steps looks like."""
    with Recorder(loader, **how) as recorder, loader:
        train(loader, recorder)
    recorder.save(path)
    events: Events = read(path)["traceEvents"]
    return events


def spans(events: Events, *names: str) -> Events:
    return sorted(
        (e for e in events if e["ph"] == "X" and (not names or e["name"] in names)),
        key=lambda e: e["ts"],
    )


def rows(events: Events) -> dict[int, str]:
    return {
        e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }


def check_format(events: Events) -> None:
    """What the Trace Event Format asks for, as far as we use it."""
    named = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        assert event["ph"] in ("X", "M", "C", "s", "f", "i"), event
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], int | float), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert event["tid"] in named, event
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
        elif event["ph"] in ("s", "f"):
            assert event["ph"] not in arrows[event["id"]], "an arrow begins and ends once"
            arrows[event["id"]][event["ph"]] = event
    for arrow in arrows.values():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
        assert arrow["f"]["bp"] == "e"
        for end in arrow.values():
            assert any(around(span, end) for span in spans(events)), f"{end} is in no span"
    check_nesting(events)


def around(span: dict[str, Any], event: dict[str, Any]) -> bool:
    return span["tid"] == event["tid"] and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]


def check_nesting(events: Events) -> None:
    """Spans of a row lie within each other or apart."""
    by_row: dict[int, Events] = defaultdict(list)
    for span in spans(events):
        by_row[span["tid"]].append(span)
    for row in by_row.values():
        open_until: list[float] = []
        for span in sorted(row, key=lambda span: (span["ts"], -span["dur"])):
            while open_until and open_until[-1] <= span["ts"] + 0.001:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1] + 0.002, span
            open_until.append(end)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trace_keeps_the_rules_of_the_format(corpus: Path, tmp_path: Path, workers: int) -> None:
    path = tmp_path / "trace.json"
    check_format(recorded(make(corpus, n_workers=workers, shuffle=True), path))
    whole = read(path)
    assert whole["displayTimeUnit"] == "ms"
    told = whole["otherData"]
    assert told["lost"] == told["samples_failed"] == told["steps_missed"] == 0


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_stage_is_on_the_row_of_its_thread_with_what_it_worked_on(
    corpus: Path, tmp_path: Path, workers: int
) -> None:
    events = recorded(make(corpus, n_workers=workers), tmp_path / "trace.json")
    assert {"fetch", "decode", "tokenize", "pack", "batch"} <= {e["name"] for e in spans(events)}
    on = rows(events)
    for span in spans(events, "tokenize"):
        assert on[span["tid"]].startswith("penstock-worker" if workers else "trainer (MainThread)")
        assert span["args"]["what"].startswith(str(corpus / "parquet"))
    assert ("penstock-producer" in on.values()) == (workers > 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_shows_every_call_of_next_and_every_step(
    corpus: Path, tmp_path: Path, workers: int
) -> None:
    events = recorded(make(corpus, n_workers=workers), tmp_path / "trace.json")
    calls, steps = spans(events, "next"), spans(events, "step")
    assert len(calls) == len(steps) == STEPS
    for call, step, after in zip(calls, steps, [*calls[1:], None], strict=True):
        assert step["ts"] == pytest.approx(call["ts"] + call["dur"], abs=0.01)
        assert step["dur"] >= 2000  # the wait that stands for a step, at least
        assert after is None or after["ts"] == pytest.approx(step["ts"] + step["dur"], abs=0.01)
        assert call["args"]["tokens"] == 4 * 32


def test_what_worker_processes_did_is_there(corpus: Path, tmp_path: Path) -> None:
    events = recorded(make(corpus, n_workers=2, workers="process"), tmp_path / "trace.json")
    check_format(events)
    on = rows(events)
    made = spans(events, "decode", "tokenize")
    assert {span["name"] for span in made} == {"decode", "tokenize"}
    assert all(on[span["tid"]].startswith("penstock-worker") for span in made)
    first, last = spans(events, "next")[0], spans(events, "next")[-1]
    assert made[0]["ts"] < first["ts"] + first["dur"], (
        "the first batch was made of it, on the same clock"
    )
    assert all(span["ts"] < last["ts"] + 60e6 for span in made)


def test_fetches_from_a_server_are_on_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = pa.BufferOutputStream()
    texts = [random.Random(i).randbytes(2000).hex() for i in range(40)]
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=5)
    with HubServer(latency_s=0.02) as hub:
        hub.add("org/data", {"a.parquet": sink.getvalue().to_pybytes()})
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        data = TextDataset(
            "hf://datasets/org/data",
            tokenizer="byte",
            seq_len=64,
            cache=False,
            remote={"fetches": 2},
        )
        events = recorded(AsyncDataLoader(data, 4, n_workers=1), tmp_path / "trace.json")
    check_format(events)
    assert read(tmp_path / "trace.json")["otherData"]["samples_failed"] == 0
    on = rows(events)
    fetches = [
        span for span in spans(events, "fetch") if on[span["tid"]].startswith("penstock-fetch")
    ]
    assert fetches
    assert all("hf://datasets/org/data" in span["args"]["what"] for span in fetches)
    ids = [
        event["id"]
        for event in events
        if event["ph"] == "s" and on[event["tid"]].startswith("penstock-fetch")
    ]
    ended = [event for event in events if event["ph"] == "f" and event["id"] in ids]
    assert any(on[event["tid"]] == "penstock-producer" for event in ended), (
        "the producer waited for a fetch"
    )


def test_an_arrow_leads_from_the_work_to_the_wait_that_it_ended(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode

    def slow(self: Tokenizer, *args: Any, **more: Any) -> Any:
        threading.Event().wait(0.02)
        return encode(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    events = recorded(make(corpus, n_workers=1), tmp_path / "trace.json")
    check_format(events)
    on = rows(events)
    ways = Counter()
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    for begin in (event for event in events if event["ph"] == "s"):
        inner = min((s for s in spans(events) if around(s, begin)), key=lambda s: s["dur"])
        wait = min(
            (s for s in spans(events) if around(s, ends[begin["id"]])), key=lambda s: s["dur"]
        )
        assert wait["name"] == "waits for input"
        ways[on[begin["tid"]], inner["name"], on[wait["tid"]]] += 1
    assert ways["penstock-worker-0", "tokenize", "penstock-producer"] > 0, ways
    assert any(
        source == "penstock-producer" and sink.startswith("trainer") for source, _, sink in ways
    ), ways


def test_queues_pauses_and_events_are_drawn(corpus: Path, tmp_path: Path) -> None:
    loader = make(corpus, n_workers=1)
    with Recorder(loader) as recorder, loader:
        train(loader, recorder, 5)
        with loader.pause("eval"):
            threading.Event().wait(0.02)
        train(loader, recorder, 5)
        loader.telemetry.event("tune", what="prefetch_size", why=float("nan"))
        recorder.sample()
    events = read(recorder.save(tmp_path / "trace.json"))["traceEvents"]
    check_format(events)
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"batches ready", "chunks ready"}
    assert max(event["args"]["ready"] for event in counters if event["name"] == "batches ready") > 0
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert marks.count("loader_ready") == marks.count("tune") == 1
    [pause] = spans(events, "eval")
    assert pause["dur"] >= 20_000
    within = [step for step in spans(events, "step") if around(step, pause)]
    assert len(within) == 1
    assert pause["ts"] + pause["dur"] <= within[0]["ts"] + within[0]["dur"] + 0.002
    assert len(loader.telemetry.take_events()) == 3, "they are still there for a heartbeat"


def test_steps_are_found_without_anybody_calling_sample(corpus: Path, tmp_path: Path) -> None:
    loader = make(corpus, n_workers=2)
    with Recorder(loader) as recorder, loader:
        for _ in range(2000):  # more than the telemetry keeps
            next(loader)
    told = read(recorder.save(tmp_path / "trace.json"))["otherData"]
    assert told["steps"] + told["steps_missed"] == 2000
    assert told["steps"] > 1500


def test_a_trainer_on_a_thread_of_its_own_has_its_own_row(corpus: Path, tmp_path: Path) -> None:
    loader = make(corpus, n_workers=1)
    with Recorder(loader) as recorder, loader:
        trainer = threading.Thread(target=train, args=(loader, recorder), name="epochs")
        trainer.start()
        trainer.join(60)
    events = read(recorder.save(tmp_path / "trace.json"))["traceEvents"]
    assert {rows(events)[span["tid"]] for span in spans(events, "next")} == {"trainer (epochs)"}


def test_threads_of_the_same_name_have_rows_of_their_own(tmp_path: Path, corpus: Path) -> None:
    loader = make(corpus, n_workers=1)
    clock, both = loader.telemetry.clock, threading.Barrier(2, timeout=30)

    def work() -> None:
        with clock.stage("fetch"):
            both.wait()  # at the same time, so that on one row they would overlap
        both.wait()

    with Recorder(loader) as recorder:
        threads = [threading.Thread(target=work, name="same") for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    events = read(recorder.save(tmp_path / "trace.json"))["traceEvents"]
    assert {rows(events)[span["tid"]] for span in spans(events, "fetch")} == {"same", "same (2)"}


def test_what_is_under_way_at_the_end_is_drawn_up_to_it(corpus: Path, tmp_path: Path) -> None:
    loader = make(corpus, n_workers=1)
    with Recorder(loader) as recorder, loader.telemetry.clock.stage("decode", "a file"):
        recorder.__exit__(None, None, None)
        [span] = spans(read(recorder.save(tmp_path / "trace.json"))["traceEvents"], "decode")
    assert span["args"] == {"what": "a file"}


def test_only_the_latest_is_kept_and_what_fell_out_is_told(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        events = recorded(make(corpus, n_workers=2), tmp_path / "trace.json", max_segments=20)
    told = read(tmp_path / "trace.json")["otherData"]
    assert told["segments"] == told["steps"] == 20
    assert told["lost"] > 0
    assert f"leaves out the first {told['lost']} of" in caplog.text
    assert len(spans(events, "next")) == 20
    check_format(events)


def test_nothing_is_recorded_outside_the_block(corpus: Path, tmp_path: Path) -> None:
    with make(corpus, n_workers=1) as loader:
        recorder = Recorder(loader)
        train(loader, recorder, 5)
        with recorder:
            train(loader, recorder, 5)
        before = recorder.save(tmp_path / "a.json").read_text()
        train(loader, recorder, 5)
        assert recorder.save(tmp_path / "b.json").read_text() == before
        assert all(track.log is None for track in loader.telemetry.clock.timelines)
    events = json.loads(before)["traceEvents"]
    assert len(spans(events, "next")) == 5
    check_format(events)


def test_a_recorder_can_be_used_again(corpus: Path, tmp_path: Path) -> None:
    with make(corpus, n_workers=1) as loader:
        recorder = Recorder(loader.telemetry)
        for steps in (3, 4):
            with recorder:
                train(loader, recorder, steps)
            assert (
                len(spans(read(recorder.save(tmp_path / "a.json"))["traceEvents"], "next")) == steps
            )


def test_a_sample_that_fails_is_counted_and_never_reaches_the_pipeline(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(corpus, n_workers=1)
    with loader, Recorder(loader) as recorder:
        loader.telemetry.gauges = lambda: {"queues": {"batches": {}}}  # has no depth
        train(loader, recorder)
    recorder.save(tmp_path / "trace.json")
    assert read(tmp_path / "trace.json")["otherData"]["samples_failed"] > 0
    assert caplog.text.count("a trace lacks a sample") == 1


def test_a_recorder_refuses_what_it_cannot_record(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a loader"):
        Recorder([1, 2])
    with pytest.raises(ConfigError, match=r"max_segments=0"):
        Recorder(make(corpus), max_segments=0)
    loader = make(corpus)
    with pytest.raises(ConfigError, match=r"nothing was recorded"):
        Recorder(loader).save(tmp_path / "trace.json")
    with Recorder(loader), pytest.raises(ConfigError, match=r"recorded already"), Recorder(loader):
        pass
    with Recorder(loader) as recorder:
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written"):
        recorder.save(tmp_path / "file" / "trace.json")


# With torch.profiler


@pytest.fixture(scope="module")
def profiled(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was recorded and profiled at once."""
    from torch.profiler import ProfilerActivity, profile, record_function

    folder = tmp_path_factory.mktemp("profiled")
    loader = make(corpus, n_workers=1)
    with (
        Recorder(loader) as recorder,
        loader,
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        for step in range(10):
            with record_function(f"take {step}"):
                next(loader)
            recorder.sample()
            threading.Event().wait(0.01)
    profiler.export_chrome_trace(str(folder / "profile.json"))
    return recorder.save(folder / "trace.json"), folder / "profile.json"


def test_next_lies_within_the_profilers_region_around_it_once_both_are_merged(
    profiled: tuple[Path, Path], tmp_path: Path
) -> None:
    events = read(merge(*profiled, tmp_path / "both.json"))["traceEvents"]
    calls = spans(events, "next")
    assert len(calls) == 10
    for step, call in enumerate(calls):
        [region] = [e for e in spans(events, f"take {step}") if e["cat"] == "user_annotation"]
        assert region["ts"] - 1000 <= call["ts"]
        assert call["ts"] + call["dur"] <= region["ts"] + region["dur"] + 1000
        assert call["pid"] != region["pid"], (
            "a row of the profiler's could not take spans that reach out of its own"
        )
    ours = [event for event in events if event["pid"] == calls[0]["pid"]]
    check_format(ours)


def test_a_merged_trace_has_all_of_both_and_a_compressed_profile_will_do(
    profiled: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, profile = profiled
    packed = tmp_path / "profile.json.gz"
    packed.write_bytes(gzip.compress(profile.read_bytes()))
    both = read(merge(ours, packed, tmp_path / "both.json"))
    theirs = json.loads(profile.read_text())
    assert len(both["traceEvents"]) == len(theirs["traceEvents"]) + len(read(ours)["traceEvents"])
    assert both["traceEvents"][: len(theirs["traceEvents"])] == theirs["traceEvents"]
    assert both["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]


def test_a_profile_without_a_base_counts_from_1970(
    profiled: tuple[Path, Path], tmp_path: Path
) -> None:
    ours = read(profiled[0])
    at = ours["baseTimeNanoseconds"] / 1e3 + spans(ours["traceEvents"], "next")[0]["ts"]
    old = {
        "traceEvents": [
            {"ph": "X", "name": "old", "ts": at, "dur": 10, "pid": 1, "tid": 1, "id": 7}
        ]
    }
    (tmp_path / "old.json").write_text(json.dumps(old))
    events = read(merge(profiled[0], tmp_path / "old.json", tmp_path / "both.json"))["traceEvents"]
    assert spans(events, "next")[0]["ts"] == pytest.approx(at, abs=1)
    assert min((e["id"] for e in events if e["ph"] == "s"), default=8) > 7


def bad_profiles() -> Iterator[tuple[str, type[Exception], str]]:
    span = '{"ph": "X", "ts": 5, "dur": 1, "pid": 1, "tid": 1, "name": "long ago"}'
    yield f"[{span}]", ConfigError, "not recorded at the same time"
    yield '{"traceEvents": []}', NoData, "no span"
    yield '{"traceEvents": [{"ph": "X"}]}', CorruptFile, "without ts"
    yield '{"traceEvents": [1]}', CorruptFile, "not a Chrome trace"
    yield '{"loader": {}}', CorruptFile, "not a Chrome trace"
    yield '{"traceEvents": [', CorruptFile, "is not JSON"
    yield (
        f'{{"baseTimeNanoseconds": "x", "traceEvents": [{span}]}}',
        CorruptFile,
        "baseTimeNanoseconds",
    )


@pytest.mark.parametrize(("text", "kind", "words"), list(bad_profiles()))
def test_what_cannot_be_merged_is_refused_with_its_name(
    profiled: tuple[Path, Path], tmp_path: Path, text: str, kind: type[Exception], words: str
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(kind, match=words) as caught:
        merge(profiled[0], tmp_path / "bad.json", tmp_path / "both.json")
    assert "bad.json" in str(caught.value)
    assert not (tmp_path / "both.json").exists()


def test_traces_in_the_wrong_order_and_missing_ones_are_named(
    profiled: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, profile = profiled
    with pytest.raises(ConfigError, match=r"give that one first"):
        merge(profile, ours, tmp_path / "both.json")
    with pytest.raises(NoData, match=r"none\.json: there is no such file"):
        merge(ours, tmp_path / "none.json", tmp_path / "both.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(profile.read_bytes())[:100])
    with pytest.raises(CorruptFile, match=r"cut\.json\.gz"):
        merge(ours, tmp_path / "cut.json.gz", tmp_path / "both.json")


# The command


def run(*args: object) -> Result:
    app = typer.Typer()
    app.command()(trace_command)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_command_traces_an_address_and_says_where_to_look(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "trace.json"
    done = run(
        corpus / "parquet",
        "-o",
        out,
        "--steps",
        12,
        "--step-ms",
        1,
        "--seq-len",
        16,
        "--batch-size",
        2,
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("12 steps: ")
    assert "ui.perfetto.dev" in done.stdout
    assert str(out) in done.stdout
    events = read(out)["traceEvents"]
    check_format(events)
    assert len(spans(events, "next")) == 12
    assert {"fetch", "decode", "tokenize", "pack", "batch"} == {
        s["name"] for s in spans(events)
    } & set(STAGES)
    assert all(call["args"]["tokens"] == 32 for call in spans(events, "next"))


def test_the_command_traces_what_a_settings_file_describes(corpus: Path, tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(
        f"[data]\nkind = 'text'\nurls = '{corpus / 'parquet'}'\ntokenizer = 'byte'\nseq_len = 16\n[loader]\nbatch_size = 2\nepochs = 1\n"
    )
    out = tmp_path / "trace.json"
    done = run(settings, "-o", out, "--steps", 1_000_000, "--step-ms", 0, "--batch-size", 256)
    assert done.exit_code == 0, (done.output, done.exception)
    steps = int(done.stdout.split()[0])
    assert 1 < steps < 1_000_000, "it ends with the data"
    assert read(out)["otherData"]["steps"] == steps
    done = run(settings, "--seq-len", 8, "--steps", 2, "--step-ms", 0, "-o", out)
    assert done.exit_code == 0, (done.output, done.exception)
    tokens = [call["args"]["tokens"] for call in spans(read(out)["traceEvents"], "next")]
    assert tokens == [16, 16], "options override the file"


@pytest.mark.parametrize("name", ["run.json", "run.jsonc"])
def test_a_settings_file_in_json_is_no_data_and_needs_no_batch_size(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    data = {"kind": "text", "urls": str(corpus / "parquet"), "tokenizer": "byte", "seq_len": 16}
    (tmp_path / name).write_text(json.dumps({"data": data}))
    done = run(tmp_path / name, "-o", tmp_path / "trace.json", "--steps", 2, "--step-ms", 0)
    assert done.exit_code == 0, (done.output, done.exception)
    assert [
        call["args"]["tokens"]
        for call in spans(read(tmp_path / "trace.json")["traceEvents"], "next")
    ] == [256] * 2


def test_the_command_merges_two_traces(profiled: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(profiled[0], "--merge", profiled[1], "-o", tmp_path / "both.json")
    assert done.exit_code == 0, done.output
    assert len(spans(read(tmp_path / "both.json")["traceEvents"], "next")) == 10


@pytest.mark.parametrize(
    "args", [[], ["x.parquet", "--settings", "y.toml"], ["--merge", "profile.json"]]
)
def test_the_command_says_what_it_needs(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(run(*args).exception, ConfigError)
    assert not list(tmp_path.iterdir())


def test_times_are_those_of_the_calendar(corpus: Path, tmp_path: Path) -> None:
    before = time.time()
    events = recorded(make(corpus, n_workers=1), tmp_path / "trace.json")
    after = time.time()
    base = read(tmp_path / "trace.json")["baseTimeNanoseconds"] / 1e9
    for span in spans(events):
        assert (
            before - 0.01
            <= base + span["ts"] / 1e6
            <= base + (span["ts"] + span["dur"]) / 1e6
            <= after + 0.01
        )
