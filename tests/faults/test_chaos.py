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


def test_random_faults_do_not_change_the_stream(
    hub: HubServer, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: Counter[str] = Counter()
    cut_card = 271_431_157  # the answer with the dataset's card ends early
    for seed in [*range(8), cut_card]:
        rng = random.Random(seed)
        form = rng.choice([*FORMS, "parquet", "parquet", ""])
        url = hf(form) if form else "hf://datasets/org/name"
        how = rng.choice(WAYS)
        stops = sorted(rng.sample(range(1, 40), rng.choice([0, 0, 1, 2])))
        expiries = sorted(rng.sample(range(1, 40), rng.choice([0, 1])))
        rate = rng.choice([0.05, 0.1, 0.25])
        kinds = SURVIVABLE if rate < 0.2 else BEARABLE
        chaos = Chaos(seed, rate, kinds, details={"slow": {"delay_s": 0.1}})
        cache = rng.random() < 0.5
        monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / str(seed)))
        hub.clear_faults()
        hub.clear_log()
        hub.fault(chaos)
        got: list[str] = []
        state = None
        for stop in [*stops, None]:  # stopped and resumed on the way
            with loader_of(dataset(url, remote=PATIENT, cache=cache), **how) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for expiry in [n for n in expiries if len(got) < n < (stop or 10**6)]:
                    got += take(loader, expiry - len(got))
                    hub.expire_signatures()
                got += take(loader, 10**6 if stop is None else max(0, stop - len(got)))
                state = json.loads(json.dumps(loader.state_dict()))
        about = f"seed {seed}: {url} with {how}, stops {stops}, struck by {dict(chaos.struck)}"
        assert got == expected(form or CHOSEN), about
        struck += chaos.struck
    assert struck.total() > 5
