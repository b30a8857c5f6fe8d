"""Heartbeat files as a real run leaves them, made from a seed.

Each option is something that happens to runs: a warmup, stalls, a rank that is slower than the others, a loss that is
not finite, a resume, a file cut off in the middle of a line, a run that is still going.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.watch.heartbeat import iso

STAGES = ("fetch", "decode", "tokenize", "pack", "batch", "copy")
START = 1_790_000_000.0
PARTS = ("import", "list", "open", "fetch", "decode", "tokenize", "pack")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What happened in the run."""

    steps: int = 240
    ranks: int = 1
    seed: int = 0
    step_s: float = 0.25
    """A steady step, waiting included."""
    tokens: int = 16_384
    """Of one step of one rank."""
    wait: float = 0.03
    """The share of a steady step that is waiting for data."""
    blame: dict[str, float] = field(default_factory=lambda: {"tokenize": 0.7, "fetch": 0.3})
    """Whose waiting that is."""
    warmup: int = 12
    """Steps before steady state; the first takes 30 times as long as a steady one."""
    stalls: tuple[int, ...] = ()
    """Steps that waited two seconds for a file."""
    checkpoint_every: int = 0
    """A pause of three seconds so often."""
    slow_rank: int | None = None
    """The rank that waits four times as long as the others, which then wait for it."""
    slower_from: int | None = None
    """The step from which steps take 1.4 times as long."""
    nan_loss_from: int | None = None
    resumed_at: int | None = None
    """The run was killed ten steps after this one and went on from it, in the same file."""
    fallback_at: int | None = None
    bare: bool = False
    """Only what every line must have, and `dt_step_s`."""
    torn: int = 0
    """Lines that are cut off or not ours."""
    ended: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    """Beside the usual ones."""
    stall_file: str = "hf://datasets/org/name@abc/data/part-00017.parquet"


def write_run(folder: Path, run: Recording | None = None) -> list[Path]:
    """One file for each rank."""
    run = run or Recording()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(run.ranks):
        path = folder / f"heartbeat_rank{rank}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for text in texts(run, rank):
                file.write(text)
        paths.append(path)
    return paths


def texts(run: Recording, rank: int = 0) -> Iterator[str]:
    """The file of a rank, torn lines and all."""
    chance = random.Random(f"torn {run.seed} {rank}")
    rows = list(lines(run, rank))
    torn = set(chance.sample(range(1, len(rows)), min(run.torn, len(rows) - 1)))
    for index, line in enumerate(rows):
        text = json.dumps(line)
        if index in torn:
            yield "Traceback (most recent call last):\n" if index % 2 else f"{text[:99]}\n"
        yield text + "\n"
    if run.torn:
        yield text[: len(text) // 3]  # killed in the middle of the last one


def lines(run: Recording, rank: int = 0) -> Iterator[dict[str, Any]]:
    """Every line of a rank, whole."""
    begin, now = 0, START
    if run.resumed_at is not None:
        killed = _Session(run, rank, 0, min(run.steps, run.resumed_at + 10), START, False)
        yield from killed.lines()
        begin, now = run.resumed_at, killed.now + 60.0
    yield from _Session(run, rank, begin, run.steps, now, run.ended).lines()


class _Session:
    """A process of the run, from its boot to its end."""

    def __init__(
        self, run: Recording, rank: int, done: int, end: int, now: float, ended: bool
    ) -> None:
        self._run, self._rank, self._begin, self._end = run, rank, done + 1, end
        self.now = self._beaten = now
        self._resumed, self._ended, self._step = done > 0, ended, done
        self._chance = random.Random(f"{run.seed} {rank} {done + 1}")
        self._together = random.Random(
            f"{run.seed} {done + 1}"
        )  # ranks step in time with each other
        self._total = 0
        self._waited = self._wall = 0.0
        self._recent: list[float] = []

    def _line(self, msg: str, **fields: Any) -> dict[str, Any]:
        times = {"ts": round(self.now, 3), "iso": iso(self.now)}
        times["mono"] = round(self.now - START + 5000.0, 6)
        who = {"pid": 4000 + self._rank + 100 * self._resumed, "rank": self._rank}
        return times | who | {"step": self._step, "msg": msg} | fields

    def lines(self) -> Iterator[dict[str, Any]]:
        yield from self._opening()
        for step in range(self._begin, self._end + 1):
            yield from self._one(step)
        if self._ended and self._run.bare:
            yield self._line("shutdown")
        elif self._ended:
            totals = {"steps": self._step, "tokens_total": self._total, "wall_s": self._wall}
            totals["data_wait_pct"] = 100 * self._waited / max(self._wall, 1e-9)
            yield self._line("shutdown", reason="finished", **totals, **self._stages())

    def _opening(self) -> Iterator[dict[str, Any]]:
        run = self._run
        if run.bare:
            yield self._line("boot")
            return
        settings = {"prefetch_size": 8, "n_workers": 2, "batch_size": 16, "seq_len": 1024}
        about = {"host": f"node{self._rank // 8}", "world_size": run.ranks}
        about |= {"resumed": self._resumed, "versions": {"penstock": "0.5.0", "torch": "2.13.0"}}
        yield self._line("boot", settings=settings | run.settings, **about)
        parts = {name: self._chance.uniform(0.1, 1.2) for name in PARTS}
        self.now += sum(parts.values()) + self._chance.uniform(0.1, 1.2)  # and the copy
        yield self._line("loader_ready", dt=sum(parts.values()), parts=parts)
        self.now += 0.4
        yield self._line("loader_warmup", requested=8, filled=8, wait_ms=412.5)

    def _one(self, step: int) -> Iterator[dict[str, Any]]:
        """A step, and what happened around it."""
        run, index = self._run, step - self._begin
        compute = run.step_s * (1 - run.wait) * (1 + 0.03 * self._together.gauss(0, 1))
        if index < run.warmup:
            compute *= 1 + 29 * math.exp(-1.6 * index) + 0.3 * (1 - index / run.warmup)
        if run.slower_from is not None and step >= run.slower_from:
            compute *= 1.4
        wait = run.step_s * run.wait * self._chance.uniform(0.4, 1.6)
        blame = dict(run.blame)
        if run.slow_rank is not None:
            wait *= 4
            if self._rank != run.slow_rank:
                blame = {name: share / 4 for name, share in blame.items()} | {"ranks": 0.75}
        if step in run.stalls:
            wait, blame = wait + 2.0, {"fetch": 1.0}
            self.now += 1.5
            self._step = step - 1
            yield self._line("stall", stage="fetch", where=run.stall_file, wait_s=1.5)
            self.now -= 1.5
        took = max(compute, 1e-4) + wait
        self.now += took
        self._step = step
        self._total += run.tokens
        self._wall += took
        self._waited += wait
        yield self._progress(step, took, wait, blame, index)
        yield from self._around(step, index)

    def _progress(
        self, step: int, took: float, wait: float, blame: dict[str, float], index: int
    ) -> dict[str, Any]:
        run = self._run
        if run.bare:
            return self._line("progress", dt_step_s=round(took, 6))
        self._recent = [*self._recent[-99:], wait]
        ordered = sorted(self._recent)
        p50, p95, p99 = (ordered[int(q * (len(ordered) - 1))] * 1000 for q in (0.5, 0.95, 0.99))
        loss: float | str = round(2.2 + 8.0 * math.exp(-step / 80) + self._chance.gauss(0, 0.04), 4)
        if run.nan_loss_from is not None and step >= run.nan_loss_from:
            loss = "nan"
        was_paused = run.checkpoint_every and index and step % run.checkpoint_every == 1
        grad_norm = round(abs(self._chance.gauss(1.1, 0.2)), 4)
        depth = max(0, min(8, round(8 - 60 * wait / took + self._chance.gauss(0, 0.8))))
        return self._line(
            "progress", loss=loss, grad_norm=grad_norm,
            tokens=run.tokens, tokens_total=self._total, toks_per_s=round(run.tokens / took, 1),
            dt_step_s=round(took, 6), dt_fetch_s=round(wait, 6), fetch_p50_ms=p50, fetch_p95_ms=p95,
            fetch_p99_ms=p99, data_wait_pct=round(100 * wait / took, 3), queue_depth=depth,
            wait_by_stage={name: round(wait * share, 6) for name, share in blame.items()},
            queue_capacity=8, rss_bytes=900_000_000 + 40_000 * step,
            paused={"checkpoint": 3.0} if was_paused else {}, compiles=min(index + 1, 3),
        )  # fmt: skip

    def _around(self, step: int, index: int) -> Iterator[dict[str, Any]]:
        run = self._run
        if run.bare:
            return
        if self.now - self._beaten >= 1.0:
            self._beaten = self.now
            fetch = {"p50_ms": 80.0, "p95_ms": 210.0, "requests": 40 + self._step}
            more = {"queue_depth": self._chance.randint(4, 8), "rss_bytes": 900_000_000}
            yield self._line(
                "beat", since_step_s=0.01, fetch=fetch, dropped=0, **more, **self._stages()
            )
        if index == run.warmup + 25:
            rate = run.tokens / run.step_s
            at = self._begin + run.warmup
            near = {"tokens_per_s": rate, "low": 0.99 * rate, "high": 1.01 * rate}
            yield self._line("steady_state", at_step=at, overhead_s=40 * run.step_s, **near)
            yield self._line("health", status="ok", reasons=[], grace=False)
        if run.checkpoint_every and step % run.checkpoint_every == 0:
            self.now += 3.0
            yield self._line("pause", name="checkpoint", seconds=3.0)
        if step == run.slower_from:
            yield self._line("health", status="warn", reasons=["too slow"], grace=False)
        if step == run.fallback_at:
            yield self._line("fallback", to="synthetic", reason="no batch within 60 s")
            yield self._line("loader_error", error="503", stage="fetch", where=run.stall_file)

    def _stages(self) -> dict[str, Any]:
        """What each stage did, and the verdict."""
        pct = 100 * self._waited / max(self._wall, 1e-9)
        worst = max(self._run.blame, key=lambda name: self._run.blame[name])
        stages = {}
        for name in STAGES:
            busy = self._wall * (0.15 + 0.8 * self._run.blame.get(name, 0.0))
            times = {"busy_s": busy, "blocked_in_s": 0.2 * busy, "blocked_out_s": 0.1 * busy}
            stages[name] = times | {"items": self._total // 1024, "bytes": self._total * 4}
        return {"stages": stages, "verdict": f"input-bound {pct:.0f} %: {worst} {pct:.0f} %"}
