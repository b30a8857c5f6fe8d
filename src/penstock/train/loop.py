"""The training loop: build, resume, warm up, step, evaluate, save.

`Trainer` runs a step; `Loop` runs the steps of a rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.encode.batch import Batch
from penstock.errors import PenstockError, SourceError, StateError
from penstock.feed.collectives import Ranks
from penstock.feed.fallback import FeedStopped, Substitution
from penstock.train import distributed
from penstock.train.checkpoint import Checkpoints, SaveFailed, rng_state, set_aside, set_rng_state
from penstock.train.data import SyntheticBatches, ValidationData
from penstock.train.distributed import Placement
from penstock.train.model import GPT, count_parameters, loss, parameter_groups
from penstock.train.options import TrainOptions
from penstock.train.prewarm import prewarm
from penstock.train.run import RunContext, show
from penstock.watch.attribution import band
from penstock.watch.telemetry import Telemetry

EVERY_S = 2.0
"""Time between console lines."""
SEEDS = 1 << 63
"""Number of seeds that torch accepts."""


class StepResult(NamedTuple):
    """The results of a step, as tensors, because reading them would wait for the device."""

    loss: Tensor
    """The mean over the targets of all ranks."""
    grad_norm: Tensor
    lr: float


def rate(warmup: int, steps: int | None, floor: float, step: int) -> float:
    """Return the factor of the learning rate: a linear warmup, then a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if steps is None:
        return 1.0
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))


class Console:
    """Prints a line every few steps, and a summary at the end."""

    def __init__(
        self, telemetry: Telemetry, options: TrainOptions, title: str, ranks: Ranks
    ) -> None:
        """`title`: the name of the data in messages."""
        self._telemetry, self._title, self._world = telemetry, title, ranks.world
        self._silent, self._total, self._every = ranks.rank != 0, options.steps, options.log_every
        self._tokens = 0
        self._printed_at = 0.0
        self._announced = False

    def say(self, line: str) -> None:
        """Print a line."""
        if not self._silent:
            show(f"[train] {line}")

    def step(
        self, step: int, seconds: float, tokens: int, result: Any, instead: Substitution | None
    ) -> None:
        """Record a step, and print a line if due. Only then reads the loss, which may wait.

        result: the loss and learning rate. instead: the synthetic data of the step, if any.
        """
        self._tokens += self._world * tokens
        if not self._announced and (first := self._telemetry.first):
            self._announced = True
            self.say(f"first {self._title}batch fetched in {first['dt']:.2f}s")
        now = time.monotonic()
        due = step % self._every == 0 if self._every else now - self._printed_at >= EVERY_S
        if self._silent or not (due or step == self._total):
            return
        self._printed_at = now
        if instead is not None:
            self.say(f"WARNING: SYNTHETIC data since step {instead.first}: {instead.reason}")
        window = self._telemetry.timer.rolling
        wall = window.wall or seconds
        depth, capacity = self._telemetry.queue()
        self.say(
            f"step {step}{f'/{self._total}' if self._total else ''}  "
            f"loss {float(result.loss):.4f}  {self._world * (window.tokens or tokens) / wall:,.0f} tokens/s  "
            f"data wait {100 * window.wait / wall:.2f} %  queue {depth}/{capacity}  "
            f"lr {result.lr:.2e}"
        )

    def summary(self, loss: float, rows: int, elapsed_s: float) -> None:
        """Print the metrics of the run and the verdict."""
        if self._silent:
            return
        data_wait = self._telemetry.data_wait()
        verdict = self._telemetry.verdict().line
        if band(data_wait) not in verdict:
            verdict += f" ({band(data_wait)} over the whole run)"
        minutes, seconds = divmod(int(elapsed_s), 60)
        show(
            f"Metrics:\n  Loss: {loss:.3f}\n"
            f"  Avg tokens/sec: {self._tokens / elapsed_s:.1f}\n  Batch size: {rows}\n"
            f"  Data wait: {100 * data_wait:.1f}%\n  Elapsed: {minutes}m {seconds}s\n{verdict}"
        )


class Trainer:
    """Model, optimizer and learning-rate schedule on this rank."""

    def __init__(
        self, options: TrainOptions, placement: Placement, vocab_size: int, seq_len: int
    ) -> None:
        torch.manual_seed(options.seed % SEEDS)  # the same weights on all ranks
        model = GPT.from_size(options.size, vocab_size, seq_len, options.dropout)
        model.to(placement.device)
        if options.compile:
            for block in model.blocks:
                block.compile()
        self.placement, self._clip = placement, options.clip or math.inf
        self.parameter_count = count_parameters(model)
        self.model = distributed.wrap(model, placement)
        groups = parameter_groups(self.model, options.weight_decay)
        # On CPUs, the fused kernel does not support FSDP2's sharded tensors.
        fused = placement.device.type == "cuda" or placement.parallel != "fsdp"
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=fused)
        warmup = options.lr_warmup
        if warmup is None:
            warmup = min(100, (options.steps or 1000) // 10)
        factor = partial(rate, warmup, options.steps, options.lr_floor)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        torch.manual_seed((options.seed + 1 + placement.ranks.rank) % SEEDS)  # dropout differs

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Train on the batches of a step."""
        ids = sum(batch.targets.numel() for batch in batches)
        total = self._zeros()
        for n, batch in enumerate(batches):
            with distributed.syncing(self.model, n == len(batches) - 1):
                summed, count = self.loss(self.model, batch)
                (summed / ids).backward()
            total += torch.stack((summed.detach().double(), count.double()))
        distributed.add_up(total, self.placement)
        # Gradients are means over ids and ranks, but must be means over targets, without padding.
        scale = (ids * self.placement.ranks.world / total[1]).float()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                distributed.local(parameter.grad).mul_(scale)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        lr = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(total[0] / total[1], distributed.whole(norm), lr)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and its number of targets."""
        with distributed.autocast(self.placement):
            logits = model(batch.inputs, batch.positions, batch.cu_seqlens)
            return loss(logits, batch.targets)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the batches of all ranks, without training on them."""
        total = self._zeros()
        model = distributed.unwrap(self.model)  # without gradients, DDP is not needed
        model.eval()
        try:
            for batch in batches:
                summed, count = self.loss(model, batch)
                total += torch.stack((summed.double(), count.double()))
        finally:
            model.train()
        distributed.add_up(total, self.placement)
        return float(total[0] / total[1])

    def _zeros(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.placement.device)


def run(context: RunContext) -> int:
    """Train, and return the exit code."""
    imported_at = time.perf_counter()
    with distributed.join_ranks(context.options, context.device) as placement:
        return Loop(context, placement, imported_at).run()


class Loop:
    """One run on one rank."""

    def __init__(self, context: RunContext, placement: Placement, imported_at: float) -> None:
        """`imported_at`: the time at which torch was imported, on `perf_counter`."""
        options, ranks, data = context.options, placement.ranks, context.data
        self._context, self._options, self._ranks = context, options, ranks
        self._console = Console(context.telemetry, options, data.title, ranks)
        vocab_size = self._agree_on_vocab_size()
        self._trainer = trainer = Trainer(options, placement, vocab_size, data.seq_len)
        self._shape = {"size": options.size, "seq_len": data.seq_len, "vocab_size": vocab_size}
        """The settings in which a checkpoint's model must match this one."""
        state = (trainer.model, trainer.optimizer, trainer.scheduler)
        self._checkpoints = Checkpoints(options.checkpoints, ranks, options.keep, *state)
        self._synthetic = SyntheticBatches(options, data, vocab_size, placement.device)
        self._validation = ValidationData(data, options, ranks, placement.device)
        self._step = self._saved_step = 0
        self._last: StepResult | None = None
        torch_s, build_s = imported_at - context.started_at, time.perf_counter() - imported_at
        context.heartbeat.event("start", torch_s=round(torch_s, 6), build_s=round(build_s, 6))
        self._console.say(
            f"{options.size} model, {trainer.parameter_count:,} parameters, {vocab_size} ids; "
            f"{ranks.world} rank{'s' * (ranks.world > 1)} ({placement.parallel}) on {placement.device}"
        )

    def _agree_on_vocab_size(self) -> int:
        """Return the number of ids. If it is unknown on a rank, all ranks raise the same error."""
        context, ranks = self._context, self._ranks
        size, reason = 0, ""
        cause: Exception | None = None
        try:
            size = context.data.vocab_size(self._options.loader_timeout)
        except Exception as error:
            cause, reason = error, f"rank {ranks.rank}: {type(error).__name__}: {error}"
        if reasons := [text for text in ranks.gather_texts(reason) if text]:
            reason = f"the vocabulary could not be loaded: {reasons[0]}"
            about = {"error": reason, "stage": "open", "where": "vocabulary"}
            context.heartbeat.event("loader_error", **about)
            raise FeedStopped(reason) from cause
        found = ranks.gather([size, 0 if context.saved is None else context.saved.step])
        if found.count(found[0]) != len(found):
            raise StateError(
                f"the ranks differ in [number of ids, step to resume from]: {found}. All ranks need "
                f"the same data and the same {self._options.checkpoints}."
            )
        return size

    def run(self) -> int:
        """Train to the end, or until a signal. Return the exit code."""
        context, options = self._context, self._options
        self._resume()
        if options.prewarm:
            self._prewarm()
        context.feed.join(self._ranks, self._synthetic)
        self._warm_up()
        context.signals.on_stop = context.feed.interrupt
        started = time.perf_counter()
        try:
            stopped = self._train()
        except FeedStopped:
            # All ranks stop at the same step, so they can save a checkpoint.
            if options.save_last:
                self._save()
            raise
        elapsed_s = time.perf_counter() - started
        saved = self._save() if stopped or options.save_last else True
        self._summarize(elapsed_s, stopped, saved)
        return context.signals.exit_code if saved else 1

    # Before the first step

    def _resume(self) -> None:
        saved = self._context.saved
        if saved is None:
            if self._ranks.rank == 0 and (aside := set_aside(self._options.checkpoints)):
                self._console.say(f"checkpoints of an earlier run are now in {aside}")
            return
        if saved.settings != self._shape:
            raise StateError(
                f"{saved.folder}: its model has {saved.settings}, but this run has "
                f"{self._shape}. Use the same settings, or start a new run without --resume."
            )
        self._checkpoints.load(saved)
        if len(saved.ranks) == self._ranks.world:
            set_rng_state(saved.ranks[self._ranks.rank]["rng"])
        self._step = self._saved_step = saved.step
        self._console.say(f"resumed from {saved.folder}, step {saved.step}")

    def _prewarm(self) -> None:
        trainer = self._trainer
        batch, accumulate = self._synthetic(0, 0), self._context.accumulate

        def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
            summed, count = trainer.loss(model, batch)
            return summed / count

        done = prewarm(
            trainer.model, trainer.optimizer, batch, loss=mean_loss, accumulate=accumulate
        )
        self._context.heartbeat.event("prewarm", **asdict(done))
        self._console.say(f"prewarmed in {done.seconds:.2f} s")

    def _warm_up(self) -> None:
        """Wait until the loader has buffered the number of batches in the settings."""
        feed, settings = self._context.feed, self._context.settings
        batches, timeout_s = settings["warmup_batches"], settings["warmup_timeout"]
        if batches and timeout_s and (loader := feed.loader()) is not None:
            done = loader.warmup(batches, min(timeout_s, feed.left_s()))
            self._console.say(
                f"warmup: {done.filled} of {done.requested} batches ready in {done.wait_ms:.0f} ms"
            )

    # Training

    def _train(self) -> bool:
        """Train to the end. Return True if a signal stopped it."""
        context, options, feed = self._context, self._options, self._context.feed
        while options.steps is None or self._step < options.steps:
            started, step = time.perf_counter(), self._step + 1
            stopping = context.signals.received is not None
            turn = feed.next(step, context.accumulate, stopping=stopping)
            if turn.stop:
                return True
            if turn.ended:
                if self._step == 0:
                    raise SourceError(
                        f"the data ends before the first {context.accumulate} batches"
                    )
                self._console.say(f"the data ends after step {self._step}")
                return False
            self._last = result = self._trainer.step(turn.batches)
            self._step = step
            tokens = sum(batch.tokens for batch in turn.batches)
            more = {"lr": result.lr} | ({"synthetic": True} if feed.substituting else {})
            context.heartbeat.progress(step, result.loss, result.grad_norm, tokens, **more)
            substitution = feed.substitutions[-1] if feed.substituting else None
            seconds = time.perf_counter() - started
            self._console.step(step, seconds, tokens, result, substitution)
            if options.eval_every and step % options.eval_every == 0:
                self._evaluate()
            if options.save_every and step % options.save_every == 0:
                self._save()
        return False

    def _evaluate(self) -> None:
        heartbeat = self._context.heartbeat
        try:
            with self._context.telemetry.pause("eval"):
                mean = self._trainer.evaluate(self._validation)
        except PenstockError as error:
            self._console.say(f"WARNING: no evaluation after step {self._step}: {error}")
            heartbeat.event("eval_skipped", reason=str(error))
            return
        heartbeat.event("eval", loss=mean, batches=self._options.eval_batches)
        self._console.say(f"step {self._step}: validation loss {mean:.4f}")

    def _save(self) -> bool:
        """Save a checkpoint. Return False if that fails; training continues."""
        context = self._context
        if self._saved_step == self._step:
            return True
        own = {"data": context.feed.state_dict(), "rng": rng_state()}
        started = time.perf_counter()
        try:
            with context.telemetry.pause("checkpoint"):
                folder = self._checkpoints.save(self._step, own, self._shape)
        except SaveFailed as error:
            self._console.say(f"WARNING: not saved: {error}")
            context.heartbeat.event("save_failed", error=str(error))
            return False
        self._saved_step = self._step
        seconds = round(time.perf_counter() - started, 6)
        context.heartbeat.event("saved", folder=str(folder), seconds=seconds)
        return True

    # After the last step

    def _summarize(self, elapsed_s: float, stopped: bool, saved: bool) -> None:
        context, ranks, say = self._context, self._ranks, self._console.say
        if self._last is not None:
            rows = ranks.world * self._options.batch * context.accumulate
            self._console.summary(float(self._last.loss), rows, elapsed_s)
        if count := sum(each.last - each.first + 1 for each in context.feed.substitutions):
            say(f"WARNING: {count} steps ran on SYNTHETIC data")
        if stopped:
            by = getattr(context.signals.received, "name", "another rank")
            result = "saved; continue with --resume" if saved else "NOT saved"
            say(f"stopped by {by} at step {self._step}: {result if self._step else 'no steps yet'}")
        context.heartbeat.close("stopped" if stopped else "end")
        ranks.gather([0])  # wait for the heartbeats of all ranks
        if ranks.rank == 0:
            self._summarize_steps(self._options.out)
            if self._options.report is not None:
                self._write_report(self._options.out, self._options.report)

    def _summarize_steps(self, folder: Path) -> None:
        """Print the analysis of the steps that `watch`, `report` and `health` also show."""
        from penstock.watch.run import read_run

        try:
            lines = read_run([str(folder)]).analysis().summary().splitlines()
        except (PenstockError, OSError) as error:
            lines = [f"WARNING: the heartbeat cannot be read: {error}"]
        for line in lines:
            self._console.say(line)

    def _write_report(self, folder: Path, name: str) -> None:
        from penstock.watch.report import report

        page = folder / "report.html" if name == "auto" else Path(name).expanduser()
        try:
            self._console.say(f"report: {report(str(folder)).write(page).absolute()}")
        except (PenstockError, OSError) as error:
            self._console.say(f"WARNING: no report: {error}")
