"""States: small, plain, checked; and exact after the process was killed."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import AsyncDataLoader, PenstockError, Shard, TextDataset
from penstock.errors import StateError
from tests import contracts
from tests.corpus import train_vocabulary
from tests.kinds import KINDS


def loader(corpus: Path, about: dict[str, Any] | None = None, **how: Any) -> AsyncDataLoader:
    settings = {"tokenizer": "byte", "seq_len": 64} | (about or {})
    data = TextDataset(settings.pop("path", corpus / "parquet"), **settings)
    return AsyncDataLoader(data, **({"batch_size": 4, "shuffle": True, "seed": 3} | how))


def state_after(corpus: Path, n: int, **how: Any) -> dict[str, Any]:
    with loader(corpus, **how) as stream:
        contracts.take(stream, n)
        return stream.state_dict()


def test_a_copy_of_the_data_elsewhere_continues_the_run(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "moved")
    (tmp_path / "moved" / "tokenizer.json").rename(tmp_path / "moved" / "other.json")
    about = {"tokenizer": str(corpus / "tokenizer.json")}
    whole = contracts.ledger(lambda: loader(corpus, about), 40)
    state = state_after(corpus, 15, about=about)
    assert str(corpus) not in json.dumps(state)
    there = {
        "path": tmp_path / "moved" / "parquet",
        "tokenizer": str(tmp_path / "moved" / "other.json"),
    }
    with loader(corpus, there) as moved:
        moved.load_state_dict(state)
        assert contracts.take(moved, 25) == whole[15:]


@pytest.mark.parametrize(
    ("about", "how", "says"),
    [
        ({"seq_len": 32}, {}, "seq_len was 64, is 32"),
        ({"packing": "bos"}, {}, "packing was 'concat', is 'bos'"),
        ({}, {"seed": 4}, "seed was 3, is 4"),
        ({}, {"shuffle": False}, "shuffle was True, is False"),
        ({"split": "train"}, {}, "split was None, is 'train'"),
        ({"shuffle_chunks": 8}, {}, "shuffle_chunks was 16, is 8"),
        ({"eos": None}, {}, "fingerprint was 'byte/256/None', is 'byte/None/None'"),
    ],
)
def test_another_stream_is_refused_and_the_difference_named(
    corpus: Path, about: dict[str, Any], how: dict[str, Any], says: str
) -> None:
    state = state_after(corpus, 5)
    other = loader(corpus, about, **how)
    with pytest.raises(StateError) as caught:
        other.load_state_dict(state)
    assert says in str(caught.value)


def test_other_data_and_another_vocabulary_of_the_same_name_are_refused(
    corpus: Path, tmp_path: Path
) -> None:
    state = state_after(corpus, 5, about={"tokenizer": str(corpus / "tokenizer.json")})
    train_vocabulary(tmp_path / "tokenizer.json", size=350)
    with pytest.raises(StateError, match="the tokenizer changed"):
        loader(corpus, {"tokenizer": str(tmp_path / "tokenizer.json")}).load_state_dict(state)
    shutil.copytree(corpus / "parquet", tmp_path / "more")
    shutil.copy(corpus / "parquet" / "a.parquet", tmp_path / "more" / "c.parquet")
    changed = r"the data changed since the state was saved: .*count was 2, is 3"
    with pytest.raises(StateError, match=changed):
        loader(corpus, {"path": tmp_path / "more"}).load_state_dict(state)


def test_what_does_not_change_the_stream_may_change(corpus: Path) -> None:
    whole = contracts.ledger(lambda: loader(corpus), 30)
    with loader(
        corpus, {"remote": {"doc_batch": 3}, "on_bad_record": "skip"}, n_workers=5, prefetch_size=2
    ) as other:
        other.load_state_dict(state_after(corpus, 10))
        assert contracts.take(other, 20) == whole[10:]


@cache
def _shared(corpus: Path) -> tuple[AsyncDataLoader, dict[str, Any]]:
    """Return one loader, and a state of its stream, for many examples."""
    return loader(corpus, lanes=2), json.loads(json.dumps(state_after(corpus, 7, lanes=2)))


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3), max_leaves=5
)  # fmt: skip


@given(data=st.data())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None
)
def test_a_damaged_state_is_refused_or_continues_but_never_crashes(
    corpus: Path, data: st.DataObject
) -> None:
    stream, state = _shared(corpus)
    damaged = copy.deepcopy(state)
    spot: Any = damaged
    while True:
        key = data.draw(
            st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot)))
        )
        child = spot[key]
        if isinstance(child, dict | list) and child and data.draw(st.booleans()):
            spot = child
            continue
        spot[key] = data.draw(junk)
        break
    try:
        stream.load_state_dict(damaged)
    except PenstockError:
        stream.load_state_dict(state)  # a refusal changes nothing


@pytest.mark.parametrize(
    "name", ["iterable concat", "tokens", "samples", "iterated samples", "mixture stop"]
)
def test_a_state_past_the_end_is_refused_and_one_at_the_end_is_not(corpus: Path, name: str) -> None:
    make = KINDS[name].maker(corpus)
    with make(epochs=1) as stream:
        assert contracts.take(stream, 1000)
        at_end = stream.state_dict()
    with make(epochs=1) as stream:
        stream.load_state_dict(at_end)
        assert stream.next_batch(timeout=60) is None
    with make(epochs=2) as stream:  # a longer run continues with the next epoch
        stream.load_state_dict(at_end)
        assert contracts.take(stream, 3)
    with make(epochs=3) as stream:
        past = next(batch for batch in stream if batch.epoch == 2).state_dict()
    with make(epochs=1) as stream, pytest.raises(StateError, match="beyond the end"):
        stream.load_state_dict(past)


@pytest.mark.parametrize("world", [3, 5, 16])
def test_a_world_size_that_does_not_divide_the_lanes_is_refused_with_those_that_do(
    corpus: Path, world: int
) -> None:
    state = state_after(corpus, 5, lanes=8)
    with pytest.raises(StateError, match="that work are 1, 2, 4, 8"):
        loader(corpus, shard=Shard(world, 0)).load_state_dict(state)


def test_lanes_come_from_the_state_unless_given(corpus: Path) -> None:
    state = state_after(corpus, 5, lanes=8)
    stream = loader(corpus)
    stream.load_state_dict(state)
    assert stream.state_dict()["lanes"] == 8
    with pytest.raises(StateError, match="lanes was 8 when the state was saved, and is 4"):
        loader(corpus, lanes=4).load_state_dict(state)


def test_states_of_all_ranks_load_together_if_they_are_of_one_batch(corpus: Path) -> None:
    first, second, later = (
        state_after(corpus, n, shard=Shard(2, rank), lanes=4)
        for n, rank in ((5, 0), (5, 1), (6, 1))
    )
    with pytest.raises(StateError, match=r"lanes \[1, 3\] of 4.*states of all ranks"):
        loader(corpus).load_state_dict(first)
    with pytest.raises(StateError, match="not taken at the same batch"):
        loader(corpus).load_state_dict([first, later])
    loader(corpus).load_state_dict([first, second])


CHILD = """
import json, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_state import loader
from tests.contracts import digest
with loader(Path({corpus!r}), about={{"packing": {packing!r}}}, n_workers=2) as stream:
    path = {state!r}
    if os.path.exists(path):
        stream.load_state_dict(json.load(open(path)))
    for batch in stream:
        # The digest first: a state that is on disk must never be ahead of what was recorded.
        print(batch.index, digest(batch), flush=True)
        with open(path + ".new", "w") as file:
            json.dump(stream.state_dict(), file)
        os.replace(path + ".new", path)
"""


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_killed_process_resumes_exactly_at_its_last_state(
    corpus: Path, tmp_path: Path, packing: str
) -> None:
    whole = contracts.ledger(lambda: loader(corpus, {"packing": packing}), 150)
    rng = random.Random(packing)
    root, state = str(Path(__file__).parent.parent), str(tmp_path / "s")
    script = CHILD.format(root=root, corpus=str(corpus), state=state, packing=packing)
    recorded: dict[int, str] = {}
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randrange(1, 30))]
        os.kill(child.pid, signal.SIGKILL)
        lines += child.communicate()[0].splitlines()
        for number, found in (line.split() for line in lines if len(line.split()) == 2):
            assert recorded.setdefault(int(number), found) == found
    assert sorted(recorded) == list(range(len(recorded)))
    checked = min(150, len(recorded))
    assert [recorded[i] for i in range(checked)] == whole[:checked]
