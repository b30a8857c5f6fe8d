"""Record the step times of real training runs, with what their construction says about them.

In:    a folder, and how often to record each workload: `python record.py FOLDER 5`.
Out:   FOLDER/<workload>.json: how it was made, its label, and every run of the session, none left out.
Where: one process a run, so that each begins cold; the workloads in turn, so that a bad minute hits all of them alike.

The labels stand here, beside the construction, before anything is recorded. Times are by the wall clock, from the start
of a step to the start of the next, on one CPU thread.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

STEPS = 150
SLOWER_FROM = 90
COLD_READS = 30
SECOND_SHAPE = 12
SAVE_EVERY = 25
ACCUMULATE = 4
HICCUP_S = 0.15
CALM = 0.5
"""Cores that others may use in the two seconds before a run begins; it waits for that,"""
MOST_WAIT_S = 20.0
"""but no longer than this."""
COUNTED = "compiles"
"""An onset of this name is the first step after the last one at which the counter of compilations grew."""


@dataclass(frozen=True)
class Workload:
    how: str
    says: dict[str, Any]
    """What the construction implies: kind, onset, and where there is one the change, the rhythm, the spikes."""
    options: dict[str, Any] = field(default_factory=dict)


COLD = {"kind": "warmup", "onset": 1}
"""The first step makes the optimizer's state and loads what torch loads when it is first needed."""

WORKLOADS = {
    "mlp_cold": Workload("An MLP with AdamW, eager, from a cold start.", COLD),
    "mlp_warm": Workload(
        "The same after ten steps that were not recorded.",
        {"kind": "flat", "onset": 0},
        {"before": 10},
    ),
    "transformer_compiled": Workload(
        "A transformer under torch.compile (inductor, empty cache).",
        {"kind": "warmup", "onset": COUNTED, "first_causes": ["compile"]},
        {"model": "transformer", "compile": True},
    ),
    "mlp_two_shapes": Workload(
        f"An MLP under torch.compile without dynamic shapes; batches of a second shape, as much work, from step "
        f"{SECOND_SHAPE} on, in turn with the first.",
        {"kind": "warmup", "onset": SECOND_SHAPE + 1, "first_causes": ["compile"]},
        {"compile": True, "two_shapes": True},
    ),
    "slower_data": Workload(
        f"A transformer whose data takes about half a step longer from step {SLOWER_FROM} on.",
        {"kind": "slowdown", "onset": 1, "change": SLOWER_FROM, "change_cause": "data wait"},
        {"model": "transformer", "reads": lambda step: 1 if step < SLOWER_FROM else 4},
    ),
    "cold_reads": Workload(
        f"An MLP whose data takes about half a step longer for the first {COLD_READS} steps.",
        {"kind": "warmup", "onset": COLD_READS},
        {"reads": lambda step: 4 if step < COLD_READS else 1},
    ),
    "growing_data": Workload(
        "An MLP whose data takes a little longer at each step, in the end about half a step more.",
        {"kind": "slowdown", "onset": 1},
        {"reads": lambda step: 4 * step / STEPS},
    ),
    "never_settles": Workload(
        "An MLP whose data takes a little less at each step up to the last, in all about two steps' time.",
        {"kind": "no steady state", "onset": None},
        {"reads": lambda step: 12 * (1 - step / STEPS)},
    ),
    "checkpoints": Workload(
        f"An MLP that writes its state and 40 MB that are never trained to disk, flushed, every {SAVE_EVERY} steps.",
        COLD | {"spikes_every": SAVE_EVERY},
        {"save": True},
    ),
    "accumulation": Workload(
        f"A wider MLP with the optimizer at every {ACCUMULATE}th step, whose first time ends the start.",
        {"kind": "warmup", "onset": ACCUMULATE, "rhythm": ACCUMULATE},
        {"accumulate": True},
    ),
    "hiccups": Workload(
        f"An MLP of which six steps, drawn from 20 on, wait {HICCUP_S} s for nothing.",
        COLD | {"spikes": 6},
        {"hiccups": True},
    ),
}


def run(name: str, number: int) -> dict[str, Any]:
    """One run of a workload, in this process."""
    import torch
    from torch._dynamo.utils import counters

    options = WORKLOADS[name].options
    torch.set_num_threads(1)
    torch.manual_seed(number)
    wide = bool(options.get("accumulate"))
    model, shape = _model(torch, options.get("model", "mlp"), wide)
    called: Callable[[Any], Any] = (
        torch.compile(model, dynamic=False) if options.get("compile") else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    text = zlib.compress(" ".join(str(random.Random(1).random()) for _ in range(200_000)).encode())
    hiccups = random.Random(number).sample(range(20, STEPS), 6) if options.get("hiccups") else []
    reads = options.get("reads", lambda step: 0)
    frozen = torch.zeros(10_000_000) if options.get("save") else None
    starts, waits, compiles, states = [], [], [], []

    def read(step: int) -> Any:
        todo = reads(step)
        for _ in range(int(todo)):
            zlib.decompress(text)
        zlib.decompressobj().decompress(text, int(todo % 1 * 3_800_000) or 1)
        second = (
            options.get("two_shapes") and step >= SECOND_SHAPE and (step - SECOND_SHAPE) % 2 == 0
        )
        return torch.randn(shape[0] // 8, 8, *shape[1:]) if second else torch.randn(shape)

    def work(step: int, folder: str) -> None:
        batch = read(step)
        waits.append(time.perf_counter() - starts[-1])
        loss = torch.nn.functional.mse_loss(called(batch), batch)
        loss.backward()
        if not wide or step % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()
        if options.get("save") and step % SAVE_EVERY == SAVE_EVERY - 1:
            with open(Path(folder) / "checkpoint", "wb") as file:
                torch.save([model.state_dict(), optimizer.state_dict(), frozen], file)
                os.fsync(file.fileno())
        if step in hiccups:
            time.sleep(HICCUP_S)

    with tempfile.TemporaryDirectory() as folder:
        load, others = os.getloadavg()[0], _others_s()
        for step in range(-options.get("before", 0), STEPS):
            starts.append(time.perf_counter())
            work(step, folder)
            compiles.append(counters["stats"]["unique_graphs"])
            states.append(sum(v.nbytes for s in optimizer.state.values() for v in s.values()))
        starts.append(time.perf_counter())
    wall = starts[-1] - starts[0]
    taken = [round(1e6 * (b - a)) for a, b in pairwise(starts)][-STEPS:]
    made: dict[str, Any] = {"load": [round(load, 2), round(os.getloadavg()[0], 2)]}
    made["others"] = round((_others_s() - others) / wall, 2)
    if hiccups:
        made["hiccups"] = sorted(hiccups)
    before = options.get("before", 0)
    for kind, values in (("compiles", compiles), ("optimizer_state", states)):
        # What was there before the first recorded step did not grow in it: -1 says so.
        recorded = [[-1, values[before - 1]]] if before else [[0, values[0]]]
        made[kind] = recorded + [
            [i - before, values[i]]
            for i in range(max(1, before), len(values))
            if values[i] != values[i - 1]
        ]
    if "reads" in options:
        made["wait_us"] = [round(1e6 * wait) for wait in waits]
    return made | {"times_us": taken}


def _model(torch: Any, kind: str, wide: bool) -> tuple[Any, tuple[int, ...]]:
    if kind == "transformer":
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (8, 64, 128)
    width, depth, rows = (768, 3, 96) if wide else (384, 6, 256)
    layers = [
        part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.GELU())
    ]
    return torch.nn.Sequential(*layers), (rows, width)


def _others_s() -> float:
    """CPU seconds that everything but this process has used, on all cores, with what the host kept for itself."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    own = os.times()
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(own[:4])


def _wait_for_calm() -> None:
    for _ in range(int(MOST_WAIT_S / 2)):
        before = _others_s()
        time.sleep(2)
        if _others_s() - before < 2 * CALM:
            return


def main(folder: Path, times: int) -> None:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKLOADS}
    for number in range(times):
        for name in WORKLOADS:
            _wait_for_calm()
            with tempfile.TemporaryDirectory() as cache:
                done = subprocess.run(
                    [sys.executable, __file__, name, str(number)],
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                    check=True,
                    capture_output=True,
                    text=True,
                )
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, number, runs[name][-1]["load"], runs[name][-1]["others"], flush=True)
            _keep(folder / f"{name}.json", WORKLOADS[name], runs[name])


def _keep(path: Path, workload: Workload, runs: list[dict[str, Any]]) -> None:
    head = json.dumps({"how": workload.how, "says": workload.says}, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(run, separators=(",", ":")) for run in runs)
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    if sys.argv[1] in WORKLOADS:
        print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
