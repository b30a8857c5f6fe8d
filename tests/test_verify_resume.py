"""`penstock verify-resume`: what is compared, and that every kind of difference is found."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncDataLoader, Shard, TextDataset
from penstock.tools.verify_resume import verify_resume
from tests import commands

ROOT = Path(__file__).parent.parent
SMALL = ("--seq-len", "32", "--batches", "12", "--points", "3")


def run(*args: Any) -> commands.Done:
    return commands.run("verify-resume", *args)


def digest_of(data: Any, batches: int, batch_size: int, **arguments: Any) -> str:
    """Compute the digest of a stream in another way."""
    rows = b""
    with AsyncDataLoader(data, batch_size, shard=Shard(1, 0), **arguments) as loader:
        for _ in range(batches):
            batch = next(loader)
            for pair in zip(np.asarray(batch.inputs), np.asarray(batch.targets), strict=True):
                rows += hashlib.sha256(b"".join(ids.tobytes() for ids in pair)).digest()
    return hashlib.sha256(rows).hexdigest()


def digest_in(done: commands.Done) -> str:
    found = re.search(r"^sha256 +([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert found, done.output
    return found[1]


def lines(text: str, word: str) -> list[str]:
    """Return the lines that begin with a word, without it."""
    return re.findall(rf"^{word} +(.*)$", text, re.MULTILINE)


# What is compared


@pytest.mark.parametrize("form", ["parquet", "docs.jsonl", "many"])
def test_files_of_every_format_resume_exactly(form: str, corpus: Path) -> None:
    done = run(corpus / form, *SMALL)
    assert done.exit_code == 0, done.output
    data = TextDataset(corpus / form, tokenizer="byte", seq_len=32)
    assert digest_in(done) == digest_of(data, 12, 8, lanes=4)
    same = lines(done.stdout, "same")
    assert lines(done.stdout, "verdict") == [f"all {len(same)} trials gave the same stream"]
    assert not lines(done.stdout, "DIFFERENT")


def test_workers_ranks_and_repeated_resumes_are_tried(corpus: Path) -> None:
    done = run(corpus / "many", *SMALL, "--set", "n_workers=3")
    tried = "\n".join(lines(done.stdout, "same"))
    points = re.findall(r"\d+", lines(done.stdout, "points")[0])
    assert len(points) == 3
    for name in ("workers 0", "workers 1", "workers 3", "ranks 2", "ranks 4"):
        assert f"fresh, {name} " in tried
    for at in points:
        assert re.search(rf"resume at {at}, workers \d ", tried)
        assert re.search(rf"resume at (\d+, again at )?{at}, .*workers \d -> \d", tried)
    for ranks in ("1 -> 2 -> 4", "2 -> 4 -> 1", "4 -> 1 -> 2"):
        assert re.search(rf"again at \d+, ranks {ranks} +12 batches", tried)


def test_settings_and_options_of_the_run_are_used(corpus: Path) -> None:
    tokenizer = corpus / "tokenizer.json"
    settings = ("--set", "shuffle=true", "--set", "seed=9")
    done = run(corpus / "parquet", *SMALL, "--tokenizer", tokenizer, "--lanes", 2, *settings)
    data = TextDataset(corpus / "parquet", tokenizer=tokenizer, seq_len=32)
    assert digest_in(done) == digest_of(data, 12, 8, lanes=2, shuffle=True, seed=9)
    assert "for ranks 1, 2\n" in done.stdout


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
def test_data_of_a_settings_file_is_verified(written: str, corpus: Path, tmp_path: Path) -> None:
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    config = tmp_path / "run.toml"
    config.write_text(written.format(corpus=corpus, folder=tmp_path))
    done = run(config, "--batches", 16, "--points", 2)
    assert done.exit_code == 0, done.output
    assert any("-> 2 ->" in trial for trial in lines(done.stdout, "same"))


def test_finite_stream_is_compared_to_its_end(corpus: Path) -> None:
    options = ("--seq-len", 256, "--batches", 500, "--points", 2, "--set", "epochs=1")
    done = run(corpus / "parquet", *options)
    assert done.exit_code == 0, done.output
    count = re.search(r"reference +(\d+) batches of 8 rows, then the end", done.stdout)
    assert count
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=256)
    with AsyncDataLoader(data, 8, lanes=4, epochs=1) as loader:
        assert int(count[1]) == sum(1 for _ in loader)
    even = re.search(r"ranks are compared over the first (\d+) batches only", done.stdout)
    assert even
    for trial in lines(done.stdout, "same"):
        if trial.startswith("fresh"):
            assert trial.split()[-2] == (even[1] if "ranks" in trial else count[1])


# What is found


def write_documents(folder: Path, changed: int = -1) -> Path:
    """Write documents of equal length; one of them may be another one."""
    path = folder / "docs.jsonl"
    documents = [
        f"{'changed' if i == changed else 'written'} document {i:05} " * 4 for i in range(400)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def verify(make: Any, **arguments: Any) -> str:
    """Return the report on a dataset that differs."""
    report: list[str] = []
    arguments = {"batch_size": 4, "lanes": 1} | arguments
    assert not verify_resume(make, arguments, batches=20, points=3, seed=0, say=report.append)
    return "\n".join(report)


def test_changed_file_of_equal_size_is_found_where_it_differs(tmp_path: Path) -> None:
    write_documents(tmp_path)
    made: list[TextDataset] = []

    def make() -> TextDataset:
        path = write_documents(tmp_path, changed=30 if made else -1)
        made.append(TextDataset(path, tokenizer="byte", seq_len=64, chunk_bytes=4096))
        return made[-1]

    report = verify(make)
    found = re.search(
        r"fresh, workers 0: batch (\d+), row \d: docs\.jsonl, byte \d+ \(.* has other ids now",
        report,
    )
    assert found, report
    for point in re.findall(r"\d+", lines(report, "points")[0]):
        word = "same" if int(point) > int(found[1]) else "DIFFERENT"
        assert any(trial.startswith(f"resume at {point}, ") for trial in lines(report, word))


def test_resume_at_the_wrong_place_is_found(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LosesItsPlace(AsyncDataLoader):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            self.next_batch()

    monkeypatch.setattr("penstock.tools.verify_resume.AsyncDataLoader", LosesItsPlace)
    done = run(corpus / "parquet", *SMALL)
    assert done.exit_code == 1, done.output
    different = lines(done.stdout, "DIFFERENT")
    assert all(trial.startswith("fresh") for trial in lines(done.stdout, "same"))
    for trial in different:
        pattern = r"resume at (\d+), .*: batch (\d+), row \d+: expected \S+\.parquet, row group"
        found = re.match(pattern, trial)
        assert found, trial
        assert found[1] == found[2]
    assert re.search(rf"{len(different)} of \d+ trials gave another stream", done.stdout)


# What cannot be tried


def test_error_names_the_trial(tmp_path: Path) -> None:
    path = write_documents(tmp_path)
    made: list[TextDataset] = []

    def make() -> TextDataset:
        if len(made) == 4:  # the reference and three fresh trials
            path.write_text(path.read_text() + '{"text": "one more"}\n')
        made.append(TextDataset(path, tokenizer="byte", seq_len=64, chunk_bytes=4096))
        return made[-1]

    with pytest.raises(Exception, match="the data changed since the state was saved") as caught:
        verify(make)
    assert re.search(r"in the trial: resume at \d+", caught.value.__notes__[-1])
