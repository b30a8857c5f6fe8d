"""Random faults everywhere, for a while: the stream stays what it is. A failure names the seed that repeats it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import take
from tests.faults.serving import CHOSEN, FORMS, QUICK, dataset, hf, loader_of
from tests.servers import Chaos, HubServer
from tests.servers.faults import SURVIVABLE

Expected = Callable[..., list[str]]

PATIENT = replace(QUICK, stall_timeout=0.4, retry_budget=60, metadata_budget=60, backoff=0.01)
"""Faults that come again and again must not use up the budget: that they end is what is shown elsewhere."""
WAYS: list[dict[str, Any]] = [
    {"n_workers": 0},
    {"n_workers": 1},
    {"n_workers": 3},
    {"n_workers": 2, "prefetch_size": 1},
]


BEARABLE = tuple(kind for kind in SURVIVABLE if kind != "no_range")
"""A server that gives whole files for ranges is believed after a few times: where very many requests fail, that
happens by chance."""


class Round:
    """One run under faults that follow from a seed, perhaps stopped and resumed on the way."""

    def __init__(self, seed: int, hub: HubServer, cache: Path) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.form = rng.choice([*FORMS, "parquet", "parquet", ""])
        self.url = hf(self.form) if self.form else "hf://datasets/org/name"
        self.how = rng.choice(WAYS)
        self.stops = sorted(rng.sample(range(1, 40), rng.choice([0, 0, 1, 2])))
        self.expiries = sorted(rng.sample(range(1, 40), rng.choice([0, 1])))
        rate = rng.choice([0.05, 0.1, 0.25])
        kinds = SURVIVABLE if rate < 0.2 else BEARABLE
        self.chaos = Chaos(seed, rate, kinds, details={"slow": {"delay_s": 0.1}})
        self._hub = hub
        self._keeps = rng.random() < 0.5
        self._cache = cache / str(seed)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.url} with {self.how}, stopped at {self.stops}, addresses expired at {self.expiries}, "
            f"struck by {dict(self.chaos.struck)}"
        )

    def run(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        monkeypatch.setenv("PENSTOCK_CACHE", str(self._cache))
        self._hub.clear_faults()
        self._hub.clear_log()
        self._hub.fault(self.chaos)
        got: list[str] = []
        state = None
        for stop in [*self.stops, None]:
            with loader_of(
                dataset(self.url, remote=PATIENT, cache=self._keeps), **self.how
            ) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for expiry in [n for n in self.expiries if len(got) < n < (stop or 10**6)]:
                    got += take(loader, expiry - len(got))
                    self._hub.expire_signatures()
                got += take(loader, 10**6 if stop is None else max(0, stop - len(got)))
                state = json.loads(json.dumps(loader.state_dict()))
        return got


def test_random_faults_do_not_change_the_stream(
    hub: HubServer, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: Counter[str] = Counter()
    cut_card = 271_431_157  # the answer with the dataset's card ends early
    for seed in [*range(8), cut_card]:
        one = Round(seed, hub, tmp_path)
        try:
            got = one.run(monkeypatch)
        except Exception as error:
            error.add_note(str(one))
            raise
        assert got == expected(one.form or CHOSEN), str(one)
        struck += one.chaos.struck
    assert struck.total() > 5
