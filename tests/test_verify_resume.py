"""Does a stream go on exactly where it stopped? What is tried, and that a difference is found where there is one."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from penstock import AsyncDataLoader, Shard, SyntheticDataset, TextDataset
from penstock.cli.verify_resume import verify_resume
from penstock.errors import NoData
from penstock.sources.files import TextSource
from penstock.state import State
from penstock.testing import HubServer
from penstock.verify.choice import choose
from penstock.verify.resume import Trial, Verification
from penstock.verify.rows import compare
from tests.corpus import texts

ROOT = Path(__file__).parent.parent
SMALL = ("--seq-len", "32", "--batches", "12", "--points", "3")


def run(*args: Any) -> Result:
    app = typer.Typer()
    app.command()(verify_resume)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def digest_of(data: Any, batches: int, batch_size: int, **how: Any) -> str:
    """What the command should say, by another way."""
    sha = hashlib.sha256()
    with AsyncDataLoader(data, batch_size, shard=Shard(1, 0), **how) as loader:
        for _ in range(batches):
            batch = next(loader)
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                sha.update(inputs.numpy().tobytes() + targets.numpy().tobytes())
    return sha.hexdigest()


def said(done: Result) -> str:
    found = re.search(r"^sha256 +([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert found, done.output
    return found[1]


def trials(done: Result, word: str) -> list[str]:
    return [
        line.removeprefix(word).strip()
        for line in done.stdout.splitlines()
        if line.startswith(word + " ")
    ]


# What is tried


@pytest.mark.parametrize("form", ["parquet", "docs.jsonl", "many"])
def test_files_of_every_kind_resume_exactly(form: str, corpus: Path) -> None:
    done = run(corpus / form, *SMALL)
    assert done.exit_code == 0, done.output
    data = TextDataset(corpus / form, tokenizer="byte", seq_len=32)
    assert said(done) == digest_of(data, 12, 8, lanes=4)
    tried = trials(done, "same")
    assert f"all {len(tried)} trials gave the same stream" in done.stdout
    assert not trials(done, "DIFFERENT")


def test_workers_ranks_and_repeated_resumes_are_all_tried(corpus: Path) -> None:
    done = run(corpus / "many", *SMALL, "--set", "n_workers=3")
    tried = "\n".join(trials(done, "same"))
    points = re.findall(r"\d+", next(iter(trials(done, "points"))))
    assert len(points) == 3
    for workers in ("0 workers", "1 worker ", "3 workers"):
        assert f"fresh, {workers}" in tried
    for ranks in ("2 ranks", "4 ranks"):
        assert f"fresh, {ranks}" in tried
    for at in points:
        assert re.search(rf"resume at {at}, \d worker", tried)
        assert re.search(
            rf"resume at (\d+, again at )?{at}, (again at \d+, )?\d, then \d worker", tried
        )
    assert re.search(r"on 1 -> 2 -> 4 ranks +12 batches", tried)
    assert re.search(r"on 2 -> 4 -> 1 ranks +12 batches", tried)
    assert re.search(r"on 4 -> 1 -> 2 ranks +12 batches", tried)


def test_points_are_chosen_by_the_seed(corpus: Path) -> None:
    first, again, other = (run(corpus / "parquet", *SMALL, "--seed", seed) for seed in (1, 1, 2))
    assert trials(first, "points") == trials(again, "points") != trials(other, "points")
    assert said(first) == said(other)  # it is not the seed of the stream


def test_the_digest_does_not_depend_on_how_rows_are_cut_into_batches(corpus: Path) -> None:
    one = run(corpus / "parquet", "--seq-len", 32, "--batches", 12, "--batch", 8, "--points", 1)
    two = run(corpus / "parquet", "--seq-len", 32, "--batches", 24, "--batch", 4, "--points", 1)
    more = run(corpus / "parquet", "--seq-len", 32, "--batches", 13, "--batch", 8, "--points", 1)
    assert said(one) == said(two) != said(more)


def test_settings_and_options_of_the_run_hold(corpus: Path) -> None:
    vocabulary = corpus / "tokenizer.json"
    done = run(
        corpus / "parquet",
        *SMALL,
        "--tokenizer",
        vocabulary,
        "--lanes",
        2,
        "--set",
        "shuffle=true",
        "--set",
        "seed=9",
    )
    data = TextDataset(corpus / "parquet", tokenizer=vocabulary, seq_len=32)
    assert said(done) == digest_of(data, 12, 8, lanes=2, shuffle=True, seed=9)
    assert "2 lanes, for ranks 1, 2" in done.stdout


def test_a_batch_that_the_lanes_do_not_divide_is_rounded_up(corpus: Path) -> None:
    done = run(corpus / "parquet", *SMALL, "--batch", 5, "--lanes", 3)
    assert "12 batches of 6 rows" in done.stdout
    assert done.exit_code == 0


def test_one_lane_says_that_ranks_are_not_tried(corpus: Path) -> None:
    done = run(corpus / "parquet", *SMALL, "--lanes", 1)
    assert done.exit_code == 0
    assert "1 lane is for 1 rank only" in done.stdout
    assert "ranks  " not in "".join(trials(done, "same"))


def test_where_there_is_text_for_fewer_lanes_that_is_said_and_the_rest_is_tried(
    corpus: Path,
) -> None:
    done = run(corpus / "docs.jsonl.gz", *SMALL)
    assert done.exit_code == 0, done.output
    assert "more ranks, cannot be tried: lane 1 of 2 would have no text" in done.stdout
    data = TextDataset(corpus / "docs.jsonl.gz", tokenizer="byte", seq_len=32)
    assert said(done) == digest_of(data, 12, 8, lanes=1)
    asked = run(corpus / "docs.jsonl.gz", *SMALL, "--lanes", 2)
    assert asked.exit_code == 2  # what was asked for is not exchanged for something else


def test_fewer_lanes_are_taken_where_more_of_them_leave_less_than_two_batches(
    tmp_path: Path,
) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "all but 32 bytes of text."}\n' * 4)
    short = ("--seq-len", "32", "--batch", "2", "--set", "epochs=1")
    done = run(path, *short)
    assert done.exit_code == 0, done.output
    assert "2 batches of 2 rows, epoch 0; 2 lanes, for ranks 1, 2\n" in done.stdout
    assert (
        "more ranks, cannot be tried: with 4 lanes the data gives 1 batch of 4 rows\n"
        in done.stdout
    )
    assert said(done) == digest_of(
        TextDataset(path, tokenizer="byte", seq_len=32), 2, 2, lanes=2, epochs=1
    )
    asked = run(path, *short, "--lanes", 4)
    assert asked.exit_code == 2  # what was asked for is not exchanged for something else


MIXTURE = """
[loader]
batch_size = 4
shuffle = true
lanes = 2
[data]
tokenizer = "byte"
seq_len = 32
[data.mixture.text]
kind = "text"
weight = 0.7
urls = "{corpus}/parquet"
[data.mixture.noise]
kind = "synthetic"
weight = 0.3
vocab_size = 200
"""

TOKENS = """
[loader]
batch_size = 4
[data]
kind = "tokens"
path = "{folder}/ids.bin"
seq_len = 16
"""


@pytest.mark.parametrize("written", [MIXTURE, TOKENS], ids=["mixture", "tokens"])
def test_the_data_of_a_settings_file_is_tried(written: str, corpus: Path, tmp_path: Path) -> None:
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    config = tmp_path / "run.toml"
    config.write_text(written.format(corpus=corpus, folder=tmp_path))
    done = run(config, "--batches", 16, "--points", 2)
    assert done.exit_code == 0, done.output
    assert any("-> 2 ->" in trial for trial in trials(done, "same"))


def test_data_that_ends_is_compared_to_its_end(corpus: Path) -> None:
    done = run(
        corpus / "parquet", "--seq-len", 256, "--batches", 500, "--points", 2, "--set", "epochs=1"
    )
    assert done.exit_code == 0, done.output
    found = re.search(r"reference +(\d+) batches", done.stdout)
    assert found
    count = int(found[1])
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=256)
    with AsyncDataLoader(data, 8, lanes=4, epochs=1) as loader:
        assert count == sum(1 for _ in loader)
    assert "the data ends there: 500 batches were asked for" in done.stdout
    even = re.search(r"compared over the first (\d+) batches only", done.stdout)
    assert even
    assert 1 < int(even[1]) < count
    for trial in trials(done, "same"):
        if trial.startswith("fresh"):
            assert trial.split()[-2] == (even[1] if "ranks" in trial else found[1])


# What is found


def lines(folder: Path, changed: int = -1) -> Path:
    """Documents of the same length, one of which may be another one."""
    path = folder / "docs.jsonl"
    documents = [
        f"{'changed' if i == changed else 'written'} document {i:05} " * 4 for i in range(400)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def verification(path: Path, **how: Any) -> Verification:
    def make() -> TextDataset:
        return TextDataset(path, tokenizer="byte", seq_len=64, chunk_bytes=4096)

    return Verification(make, {"batch_size": 4} | how, batches=20, points=3, seed=0)


def test_a_file_exchanged_for_another_of_equal_size_is_found_where_it_differs(
    tmp_path: Path,
) -> None:
    path = lines(tmp_path)
    tried = verification(path, lanes=1)
    size = path.stat().st_size
    lines(tmp_path, changed=30)
    assert path.stat().st_size == size
    at = tried.reference.stream.batches
    expected = next(
        (number, row)
        for number, rows in enumerate(at)
        for row, known in enumerate(rows)
        if holds(known.origin, 30, path)
    )
    found = {trial.name: trial.difference for trial in tried.trials()}
    fresh = found["fresh, 0 workers"]
    assert fresh is not None
    assert (fresh.batch, fresh.row) == expected
    assert (
        fresh.expected == fresh.got == tried.reference.stream.batches[fresh.batch][fresh.row].origin
    )
    assert re.search(r"row \d: docs\.jsonl \(byte \d+, .* has other ids now", str(fresh))
    # Whoever resumes after the place reads the rest, which is as it was.
    for at_point in tried.reference.points:
        alone = [
            difference
            for name, difference in found.items()
            if name.startswith(f"resume at {at_point}, ")
        ]
        assert all((difference is None) == (at_point > fresh.batch) for difference in alone)


def holds(origin: str, document: int, path: Path) -> bool:
    """Whether a row has the text of a document in which it differs: its first word."""
    found = re.search(r"byte (\d+), tokens (\d+) to (\d+)(?: and (\d+) more)?", origin)
    assert found, origin
    starts = [0]
    for line in path.read_text().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = starts.index(int(found[1]))
    return first <= document <= first + int(found[4] or 0) and not (
        first == document and int(found[2]) > 0
    )


def lose_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume that begins one token too late."""
    real = TextSource.check_place

    def check_place(self: TextSource, value: Any) -> Any:
        place = real(self, value)
        return place._replace(token=place.token + 1)

    monkeypatch.setattr(TextSource, "check_place", check_place)


def test_a_source_that_loses_its_place_is_found_by_every_resume(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_place(monkeypatch)
    done = run(corpus / "parquet", *SMALL)
    assert done.exit_code == 1, done.output
    different = trials(done, "DIFFERENT")
    assert different
    assert all(trial.startswith("fresh") for trial in trials(done, "same"))
    for trial in different:
        found = re.match(
            r"resume at (\d+), .*: batch (\d+), row \d+: expected \S+\.parquet \(row group", trial
        )
        assert found, trial
        assert found[1] == found[2]  # at once
    assert re.search(rf"{len(different)} of \d+ trials gave another stream", done.stdout)


def test_lanes_dealt_to_the_wrong_rank_are_found_by_ranks_alone(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = State.for_shard

    def for_shard(self: State, own: Any) -> State:
        state = real(self, own)
        if len(own) == self.lanes:
            return state
        wrong = self.places[(own[0] + 1) % self.lanes]
        return replace(state, places=dict.fromkeys(state.places, wrong))

    monkeypatch.setattr(State, "for_shard", for_shard)
    done = run(corpus / "many", *SMALL)
    assert done.exit_code == 1, done.output
    assert trials(done, "DIFFERENT")
    assert all("ranks: batch" in trial for trial in trials(done, "DIFFERENT"))
    assert all("fresh" in trial or "ranks" not in trial for trial in trials(done, "same")), (
        done.output
    )


def test_a_resume_that_forgets_how_many_batches_there_were_is_found(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = State.for_shard
    monkeypatch.setattr(State, "for_shard", lambda self, own: replace(real(self, own), batch=0))
    done = run(corpus / "parquet", *SMALL, "--lanes", 1)
    assert done.exit_code == 1, done.output
    assert len(trials(done, "same")) == 3  # those that resume nothing
    assert all("the same rows in number 0" in trial for trial in trials(done, "DIFFERENT"))


class Drifting(SyntheticDataset):
    """Data that is no function of its address: later reads give other ids."""

    reads = 0

    def __getitems__(self, indices: Any) -> Any:
        Drifting.reads += len(indices)
        rows = super().__getitems__(indices)
        return (rows + 1) % self.vocab_size if Drifting.reads > 400 else rows


def test_data_that_changes_from_read_to_read_is_found_by_a_fresh_run() -> None:
    Drifting.reads = 0
    how = {"batch_size": 8, "shuffle": False, "n_workers": 0}
    tried = Verification(lambda: Drifting(100, 16, 5000), how, batches=20, points=1, seed=0)
    found: list[Trial] = list(tried.trials())
    assert all(trial.difference is not None for trial in found[3:])
    first = next(trial.difference for trial in found if trial.difference is not None)
    assert first.expected == first.got
    assert first.expected.startswith("synthetic (row ")


def test_a_stream_that_is_shorter_or_longer_than_it_was_differs(corpus: Path) -> None:
    tried = verification(corpus / "docs.jsonl", lanes=1)
    rows = tried.reference.stream.batches[0]
    with AsyncDataLoader(
        TextDataset(corpus / "docs.jsonl", tokenizer="byte", seq_len=64, chunk_bytes=4096),
        4,
    ) as loader:
        batch = next(loader)
    assert compare(batch, rows, 0, 1, 0) is None
    short = compare(None, rows, 7, 2, 1)
    assert short is not None
    assert (short.batch, short.row, short.got) == (7, 1, "nothing: the stream has ended")
    long = compare(batch, rows[:3], 7, 1, 0)
    assert long is not None
    assert (long.row, long.expected, long.got) == (
        3,
        "nothing: the stream ends there",
        rows[3].origin,
    )


# What cannot be tried


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl does not exist"),
        (("nowhere.toml",), "cannot be read"),
        (("CORPUS/parquet", "--set", "shufle=1"), "did you mean shuffle?"),
        (("CORPUS/parquet", "--set", "shuffle"), "must be KEY=VALUE"),
        (("CORPUS/parquet", "--seq-len", "20000", "--set", "epochs=1"), "the data gives 1 batch of 8 rows"),
        (("CORPUS/parquet", "--text-field", "body"), "body"),
        (("CORPUS/parquet", "--batch", "8", "--set", "batch_size=4"), "--batch 8 and --set batch_size=4: keep one of them"),
        (("CORPUS/parquet", "--lanes", "2", "--set", "lanes=4"), "--lanes 2 and --set lanes=4: keep one of them"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_one_line_and_exit_code_2(
    args: tuple[str, ...], why: str, corpus: Path
) -> None:
    done = run(*(arg.replace("CORPUS", str(corpus)) for arg in args))
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("penstock verify-resume: could not be tried: ")
    assert why in done.stderr


def test_a_file_that_disappears_before_a_trial_names_the_trial(tmp_path: Path) -> None:
    path = lines(tmp_path)
    tried = verification(path)
    path.unlink()
    with pytest.raises(NoData, match=r"docs\.jsonl"):
        next(tried.trials())


def test_a_file_of_another_size_is_refused_by_the_state_in_a_named_trial(tmp_path: Path) -> None:
    path = lines(tmp_path)
    tried = verification(path)
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    with pytest.raises(Exception, match="the data changed since the state was saved") as caught:
        list(tried.trials())
    assert re.search(r"in the trial: resume at \d+", caught.value.__notes__[-1])


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("https://bob:PASSWD@host?sig=SECRET", "https://host"),
        ("https://host#SECRET", "https://host"),
        ("https://bob:PASSWD@host:81/a.jsonl?sig=SECRET@x", "https://host:81"),
        ("https://[host?sig=SECRET", "https://[host"),
        ("s3://bucket/a.jsonl", "s3://bucket"),
    ],
)
def test_the_server_of_an_address_is_named_without_what_is_secret(url: str, server: str) -> None:
    assert choose(url).server == server


# As a user runs it


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts()) * 4}), sink, row_group_size=20)
    with HubServer() as server:
        server.add(
            "HuggingFaceFW/fineweb-edu", {f"data/{i}.parquet": sink.getvalue() for i in range(2)}
        )
        yield server


@pytest.mark.slow
def test_the_command_proves_it_on_the_hubs_data(hub: HubServer, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "penstock.cli.main", "verify-resume", "fineweb_edu", *SMALL]
    env = os.environ | {"HF_ENDPOINT": hub.endpoint, "PENSTOCK_CACHE": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^verdict +all \d+ trials gave the same stream", done.stdout, re.MULTILINE)
