"""Two real ranks, one of which loses its data: both stop with one message, or both go on without until it is back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, TextDataset
from penstock.types import Shard
from tests.distributed.launch import Ran, Run, places, session
from tests.servers import Fault, HubServer

# Many runs are made for the first test that needs one of them.
pytestmark = pytest.mark.timeout(600)

FAULTS: dict[str, dict[str, Any]] = {
    "dead": {"kind": "reset", "after": -1},
    "hanging": {"kind": "silence"},
    "raising": {"kind": "status", "code": 503},
}
"""A server that cuts every connection, one that never answers, one that always says no."""
MOMENTS: dict[str, dict[str, Any]] = {
    "at the start": {},
    "in the middle": {"path": "*/0?[4-9].jsonl"},
}
"""Nothing comes at all, not even the listing; or the first files come, two for each rank, and then no more."""
RANKS = {"dead": 1, "hanging": 0, "raising": 1}
"""Whose server it is."""
STEPS = 70
FIRST_S, STALL_S = 6, 3
"""How long ranks wait for a server that hangs, and for one that does not, however busy the machine is."""
LIFTED_AFTER = 6
"""Synthetic steps, after which the fault is over."""

CONFIG = """
[data]
kind = "text"
urls = "hf://datasets/org/name"
tokenizer = "byte"
seq_len = 64
remote = { stall_timeout = STALL, retry_budget = BUDGET, metadata_budget = BUDGET, backoff = 0.05, hedge = false }

[loader]
batch_size = 2
lanes = 2
n_workers = 1
prefetch_size = 2
"""


class Until(Fault):
    """A fault that is over once a file is there."""

    def __init__(self, over: Path, **more: Any) -> None:
        super().__init__(times=None, method="*", **more)
        self._over = over

    def choose(self, call: Any, reply: Any) -> Fault | None:
        return None if self._over.exists() else super().choose(call, reply)


def files(folder: Path) -> dict[str, Path]:
    """Small files of which each holds rows for a few steps."""
    folder.mkdir()
    made = {}
    for n in range(30):
        path = folder / f"{n:03}.jsonl"
        path.write_text(
            "".join(
                json.dumps({"text": f"file {n} line {i}: " + "words " * 60}) + "\n"
                for i in range(4)
            )
        )
        made[path.name] = path
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fallback")
    # A server that gives errors is given up by the reader before the ranks' patience ends; one that hangs is not.
    # The other rank's server is sound: a busy machine's pauses must not use up its budget.
    (folder / "quick.toml").write_text(CONFIG.replace("BUDGET", "3.0").replace("STALL", "1.5"))
    (folder / "patient.toml").write_text(CONFIG.replace("BUDGET", "100.0").replace("STALL", "0.4"))
    return folder


@pytest.fixture(scope="module")
def text(place: Path) -> dict[str, Path]:
    return files(place / "text")


CASES = [(fault, moment) for fault in FAULTS for moment in MOMENTS]
QUICK = {("dead", "at the start"), ("hanging", "in the middle"), ("raising", "in the middle")}
"""One of each fault; the others take a minute more, and are left to `make test-slow`."""
PARAMETERS = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES
]


def name_of(fault: str, moment: str, on_stall: str) -> str:
    return f"{fault} {moment} {on_stall}"


@pytest.fixture(scope="module")
def runs(
    place: Path, text: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[dict[str, Ran]]:
    """Every fault at every moment under every policy, as far as somebody will look at it, in one launch."""
    parameters = [
        item.callspec.params for item in request.session.items if hasattr(item, "callspec")
    ]
    looked_at = {(each.get("fault"), each.get("moment")) for each in parameters}
    with ExitStack() as stack:

        def hub(*faults: Fault) -> str:
            server = stack.enter_context(HubServer())
            server.add("org/name", text)
            for fault in faults:
                server.fault(fault)
            return server.endpoint

        def described(fault: str, moment: str, on_stall: str) -> Run:
            name = name_of(fault, moment, on_stall)
            over, culprit = place / f"{name} is over", RANKS[fault]
            endpoints = [good, good]
            endpoints[culprit] = hub(Until(over, **FAULTS[fault], **MOMENTS[moment]))
            environment = [
                {"HF_ENDPOINT": address, "PENSTOCK_CACHE": str(place / f"cache {name} {rank}")}
                for rank, address in enumerate(endpoints)
            ]
            words = f"--steps {STEPS} --log-every 1 --synthetic-on-fail {int(on_stall != 'stop')}"
            config = "quick.toml"
            if fault == "hanging":
                config = "patient.toml"
                words += f" --loader-timeout {FIRST_S} --stall-timeout {STALL_S}"
            arguments = ["--config", place / config, *words.split()]
            return Run(name, arguments, environment=environment, lift=(LIFTED_AFTER, over))

        good = hub()
        made = [
            described(*case, on_stall)
            for on_stall in ("stop", "synthetic")
            for case in CASES
            if case in looked_at
        ]
        yield session(place / "runs", made, timeout_s=500)


def reason(fault: str, moment: str) -> str:
    """What the message has to say of a fault."""
    if fault != "hanging":
        return "RemoteError: hf://datasets/org/name"
    return f"no batch within {FIRST_S if moment == 'at the start' else STALL_S} s ("


@pytest.mark.parametrize(("fault", "moment"), PARAMETERS)
def test_all_ranks_stop_with_one_message_that_names_the_rank_and_the_reason(
    runs: dict[str, Ran], fault: str, moment: str
) -> None:
    run = runs[name_of(fault, moment, "stop")]
    assert run.codes == [1, 1], run.told
    messages = [re.findall(r"^penstock: (.*)$", told, re.MULTILINE) for told in run.told]
    assert messages[0] == messages[1]
    (message,) = messages[0]
    steps = [max(run.losses(rank), default=0) for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert (steps[0] == 0) == (moment == "at the start")
    assert message.startswith(
        f"1 of 2 ranks had no data; rank {RANKS[fault]}: {reason(fault, moment)}"
    ), message
    assert message.endswith(f". All ranks stop together before step {steps[0] + 1}.")


def substituted(run: Ran, rank: int) -> set[int]:
    return {line["step"] for line in run.of("progress", rank) if line.get("synthetic")}


@pytest.mark.parametrize(("fault", "moment"), PARAMETERS)
def test_all_ranks_go_on_without_data_and_with_it_again_at_the_same_steps(
    runs: dict[str, Ran], fault: str, moment: str
) -> None:
    run = runs[name_of(fault, moment, "synthetic")]
    assert run.codes == [0, 0], run.told
    changes = [
        [(line["to"], line["at_step"]) for line in run.of("fallback", rank)] for rank in (0, 1)
    ]
    assert changes[0] == changes[1]
    assert [to for to, _ in changes[0]][:2] == ["synthetic", "data"]
    assert changes[0][-1][0] == "data", "the fault was over long before the end"
    assert (changes[0][0][1] == 1) == (moment == "at the start")
    expected = {
        n
        for (_, first), (_, end) in zip(changes[0][::2], changes[0][1::2], strict=True)
        for n in range(first, end)
    }
    for rank in (0, 1):
        assert [*run.losses(rank)] == [*range(1, STEPS + 1)]
        assert substituted(run, rank) == expected
    began = run.of("fallback", 0)[0]["reason"]
    assert began == run.of("fallback", 1)[0]["reason"]
    assert began.startswith(
        f"1 of 2 ranks had no data; rank {RANKS[fault]}: {reason(fault, moment)}"
    ), began


@pytest.fixture(scope="module")
def faultless(place: Path, text: dict[str, Path]) -> list[list[Any]]:
    """Where the data of each rank stands after so many steps of a run that nothing happens to."""
    every: list[list[Any]] = []
    for rank in (0, 1):
        data = TextDataset(place / "text", tokenizer="byte", seq_len=64)
        with AsyncDataLoader(
            data, 2, shuffle=False, lanes=2, n_workers=1, shard=Shard(2, rank)
        ) as loader:
            states = [loader.state_dict()]
            for _ in range(STEPS):
                assert loader.next_batch(30) is not None
                states.append(loader.state_dict())
        every.append(states)
    return every


@pytest.mark.parametrize(("fault", "moment"), PARAMETERS)
def test_no_real_data_is_lost_or_repeated_and_the_checkpoint_says_what_was_substituted(
    runs: dict[str, Ran], faultless: list[list[Any]], fault: str, moment: str
) -> None:
    run = runs[name_of(fault, moment, "synthetic")]
    real = STEPS - len(substituted(run, 0))
    assert LIFTED_AFTER <= STEPS - real < STEPS
    assert f"WARNING: {STEPS - real} steps ran on SYNTHETIC data" in run.told[0]
    found = run.newest()
    assert found.step == STEPS
    for rank in (0, 1):
        data, expected = found.ranks[rank]["data"], faultless[rank][real]
        assert (data["loader"]["batch"], data["loader"]["row"]) == (real, expected["row"])
        assert places([data["loader"]]) == places([expected])
        steps = {n for each in data["substituted"] for n in range(each["first"], each["last"] + 1)}
        assert steps == substituted(run, rank)
        assert data["substituted"][0]["reason"] == run.of("fallback", rank)[0]["reason"]
