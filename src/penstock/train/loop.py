"""A run, once torch is there: build, resume, warm up, step, evaluate, save, report.

In:    a run whose data is being opened.
Out:   the exit code, once everything is saved and said.
Where: the trainer's thread.
State: the number of the last step, and what was measured of each.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

from penstock.errors import FeedStopped, LoaderTimeout, NoData, PenstockError, StateMismatch
from penstock.feed.fallback import Interrupted, SharedFeed
from penstock.loader import AsyncDataLoader
from penstock.run_options import PREFETCH_AT_FIRST
from penstock.train import distributed
from penstock.train.checkpoint import Checkpoints, SaveFailed, rng_state, set_rng_state
from penstock.train.console import Console, steady_lines
from penstock.train.data import StandIn
from penstock.train.prewarm import prewarm
from penstock.train.saved import set_aside
from penstock.train.steps import Done, Trainer
from penstock.train.trainer import Begun, checkpoints_of
from penstock.watch.heartbeat import compile_count
from penstock.watch.steady import StepEvent

SHAPE = ("size", "seq_len", "vocab_size")
"""What a checkpoint's model has to have in common with the run that loads it."""


def run(begun: Begun) -> int:
    """Train. Gives the exit code."""
    torch_at = time.perf_counter()
    try:
        place = distributed.meet(begun.options, begun.device)
        with distributed.blaming_peers():
            return Loop(begun, place, torch_at).run()
    finally:
        distributed.part()


class Loop:
    """One run on one rank."""

    def __init__(self, begun: Begun, place: distributed.Place, torch_at: float) -> None:
        """`torch_at`: when torch was there, in the time of `perf_counter`."""
        self._torch_at = torch_at
        self._begun, self._options, self._place = begun, begun.options, place
        self._console = Console(
            self._place.first,
            steps=begun.steps,
            log_every=begun.options.log_every,
            telemetry=begun.telemetry,
        )
        self._vocab_size = self._agreed_vocabulary()
        self._step = 0 if begun.saved is None else begun.saved.step
        self._saved_at = self._step if begun.saved is not None else -1
        self._trainer = Trainer(
            begun.options,
            self._place,
            vocab_size=self._vocab_size,
            seq_len=begun.recipe.seq_len,
            seed=begun.resolved["seed"],
            lr=begun.resolved["learning_rate"],
            steps=begun.steps,
        )
        self._checkpoints = Checkpoints(
            checkpoints_of(begun.options), self._place.peers, begun.options.keep
        )
        self._validation: SharedFeed | None = None
        self._times, self._waits, self._tokens = array("d"), array("d"), array("q")
        self._compiled: list[StepEvent] = []
        """How many graphs torch had compiled, for the steps at which that changed."""
        self._last: Done | None = None
        self._greeted = False
        self._asked = self._torch_at
        """When it was ready for its first batch."""

    def _agreed_vocabulary(self) -> int:
        """How many ids there are; or, if a rank cannot tell, the same error on all. And all go on from the same step."""
        size, why, stopping = 0, "", False
        error: Exception | None = None
        begun, limit_s = self._begun, self._options.loader_timeout
        try:
            with begun.signals.waiting():
                size = begun.vocabulary.result(limit_s)
        except Interrupted:
            stopping = True
        except LoaderTimeout as late:
            error, why = (
                late,
                f"it was not there within {limit_s:g} s. See that its server can be reached, or allow more",
            )
        except Exception as failed:
            error, why = failed, f"{type(failed).__name__}: {failed}"
        step = -1 if begun.saved is None else begun.saved.step
        told = self._place.peers.gather([size, step, int(stopping)])
        if any(each[2] for each in told):
            raise SystemExit(begun.signals.exit_code)
        texts = self._place.peers.gather_texts(why)
        for rank, text in enumerate(texts):
            if text:
                who = f"rank {rank} of {len(texts)}: " if len(texts) > 1 else ""
                reason = f"{who}the vocabulary could not be had: {text}"
                begun.heartbeat.event(
                    f"{begun.recipe.prefix}error",
                    error=reason[:1000],
                    stage="open",
                    where="vocabulary",
                )
                raise FeedStopped(reason) from error
        if len({tuple(each) for each in told}) > 1:
            raise StateMismatch(
                f"ranks differ: their vocabularies have {[each[0] for each in told]} ids, and they would go on from "
                f"steps {[each[1] for each in told]}. All ranks need the same data and the same {self._checkpoint_folder()}."
            )
        return size

    def _checkpoint_folder(self) -> Path:
        return checkpoints_of(self._options)

    # A run

    def run(self) -> int:
        """All of it. Gives the exit code."""
        begun, options = self._begun, self._options
        try:
            self._restore()
            self._prewarm()
            stand_in = StandIn(
                begun.recipe, self._vocab_size, begun.batch_size, begun.accumulate,
                doc_mask=options.doc_mask, device=self._place.device,
            )  # fmt: skip
            begun.feed.join(self._place.peers, stand_in)
            self._warm_up()
            begun.signals.training = True
            began = time.perf_counter()
            stopped = self._train_and_save()
            return self._finish(stopped, time.perf_counter() - began)
        finally:
            self._console.end()
            if self._validation is not None:
                self._validation.close()

    def _restore(self) -> None:
        begun, console = self._begun, self._console
        trainer = self._trainer
        console.say(
            f"{self._options.size} model, {trainer.parameter_count:,} parameters, {self._vocab_size} ids; "
            f"{self._place.peers.world} rank{'s' * (self._place.peers.world > 1)} ({self._place.parallel}) on {self._place.device}"
        )
        if begun.saved is None:
            if self._place.first and (moved := set_aside(self._checkpoint_folder())) is not None:
                console.say(
                    f"checkpoints of an earlier run are now in {moved}; --resume would have gone on from them"
                )
            return
        for name in SHAPE:
            now, then = self._shape()[name], begun.saved.settings.get(name)
            if now != then:
                raise StateMismatch(
                    f"{begun.saved.folder}: its model has {name} {then}, and this run asks for {now}. Ask for the "
                    "same, or leave --resume out to begin anew."
                )
        self._checkpoints.load(
            begun.saved, trainer.model, trainer.optimizer, {"scheduler": trainer.scheduler}
        )
        if begun.saved.world_size == self._place.peers.world:
            set_rng_state(begun.saved.ranks[self._place.peers.rank]["rng"])
        console.say(f"resumed from {begun.saved.folder}, step {self._step}")

    def _shape(self) -> dict[str, Any]:
        return {
            "size": self._options.size,
            "seq_len": self._begun.recipe.seq_len,
            "vocab_size": self._vocab_size,
        }

    def _prewarm(self) -> None:
        if not self._options.prewarm:
            return
        begun, trainer = self._begun, self._trainer
        dummy = StandIn(
            begun.recipe,
            self._vocab_size,
            begun.batch_size,
            1,
            doc_mask=self._options.doc_mask,
            device=self._place.device,
        )(0, 0)
        done = prewarm(
            trainer.model, trainer.optimizer, dummy, loss=trainer.mean_loss, accumulate=begun.accumulate,
            scheduler=trainer.scheduler,
        )  # fmt: skip
        begun.heartbeat.event(
            "prewarm", seconds=round(done.total_s, 6), passes=done.passes, skipped=done.skipped
        )
        self._console.say(f"prewarmed in {done.total_s:.2f} s")

    def _warm_up(self) -> None:
        """Have as many batches ready as the settings ask for; for evaluation too."""
        self._asked = time.perf_counter()
        try:
            with self._begun.signals.waiting():
                self._fill_queues()
        except Interrupted:
            return  # the ranks agree on that at their first step

    def _fill_queues(self) -> None:
        begun, settings = self._begun, self._begun.resolved
        timeout = settings["warmup_timeout"] if settings["warmup_batches"] else 0.0
        loader = begun.feed.loader() if timeout else None
        if isinstance(loader, AsyncDataLoader):
            done = loader.warmup(settings["warmup_batches"], min(timeout, begun.feed.left_s()))
            self._console.say(
                f"warmup: {done.filled} of {done.requested} batches ready in {done.wait_ms:.0f} ms"
            )
        if begun.open_validation is None:
            return
        self._validation = begun.open_validation()
        self._validation.join(self._place.peers)
        begun.signals.wakes.append(self._validation.interrupt)
        loader = self._validation.loader() if timeout else None
        if isinstance(loader, AsyncDataLoader):
            size = settings["prefetch_size"]
            wanted = min(self._options.eval_batches, PREFETCH_AT_FIRST if size == "auto" else size)
            done = loader.warmup(wanted, min(timeout, self._validation.left_s()))
            wait_ms = round(done.wait_ms, 3)
            begun.heartbeat.event(
                f"{begun.recipe.prefix}warmup", of="validation", requested=done.requested, filled=done.filled,
                wait_ms=wait_ms, fetch_warmup_batches=done.filled, fetch_warmup_wait_ms=wait_ms,
            )  # fmt: skip

    def _train_and_save(self) -> bool:
        try:
            return self._train()
        except FeedStopped:
            # All ranks stop at this very step, so what was trained so far need not be lost.
            if self._last is not None and self._options.save_last:
                self._save()
            raise

    def _train(self) -> bool:
        """Step until the end. True if somebody wanted it to stop before."""
        begun, options, feed = self._begun, self._options, self._begun.feed
        if begun.steps is not None and self._step >= begun.steps:
            self._console.say(f"nothing to do: step {self._step} of {begun.steps} is done")
        self._console.begin(self._step)
        while begun.steps is None or self._step < begun.steps:
            step, began = self._step + 1, time.perf_counter()
            turn = feed.next(step, begun.accumulate, stopping=begun.signals.came is not None)
            waited = time.perf_counter() - began
            if turn.stop:
                return True
            if turn.ended:
                if self._step == 0:
                    raise NoData(
                        f"the data ends before the first step: a step needs {begun.accumulate} batches of {begun.batch_size} rows "
                        f"of {begun.recipe.seq_len + 1} ids on each rank"
                    )
                self._console.say(f"the data ends after step {self._step}")
                return False
            if not self._greeted and not feed.substituting:
                self._greet()
            self._last = done = self._trainer.step(turn.batches)
            self._step = step
            synthetic = {"synthetic": True} if feed.substituting else {}
            begun.heartbeat.progress(
                step,
                loss=done.loss,
                grad_norm=done.grad_norm,
                tokens=done.tokens,
                lr=done.lr,
                **synthetic,
            )
            self._note(time.perf_counter() - began, waited, done.tokens)
            self._console.step(
                step, done, world=self._place.peers.world, warning=self._without_data()
            )
            if options.eval_every and step % options.eval_every == 0:
                self._evaluate()
            if options.save_every and step % options.save_every == 0:
                self._save()
        return False

    def _note(self, seconds: float, waited: float, tokens: int) -> None:
        """What the summary says of a step."""
        self._times.append(seconds)
        self._waits.append(waited)
        self._tokens.append(tokens)
        compiled = compile_count()
        if compiled is not None and (not self._compiled or self._compiled[-1].value != compiled):
            self._compiled.append(StepEvent(len(self._times) - 1, "compiles", float(compiled)))

    def _without_data(self) -> str:
        feed = self._begun.feed
        if not feed.substituting:
            return ""
        return f"SYNTHETIC data since step {feed.substitutions[-1].first}: {feed.substitutions[-1].reason}"

    def _greet(self) -> None:
        """The first batch is there: how long it took, and how much of that nobody had to wait for."""
        begun, self._greeted = self._begun, True
        ready, opened = (
            begun.telemetry.ledger.marks.get("first_batch", self._asked),
            begun.feed.opened_at,
        )
        hidden = max(0.0, min(ready, self._asked) - opened)
        torch_s, build_s = self._torch_at - begun.at, self._asked - self._torch_at
        told = {
            "torch_s": torch_s,
            "build_s": build_s,
            "data_s": ready - opened,
            "hidden_s": hidden,
        }
        told["waited_s"] = max(0.0, ready - self._asked)
        begun.heartbeat.event(
            "start", **{name: round(seconds, 6) for name, seconds in told.items()}
        )
        of = f"{begun.recipe.title} " if begun.recipe.title else ""
        self._console.say(
            f"first {of}batch fetched in {begun.telemetry.first.get('dt', ready - opened):.2f}s"
        )
        self._console.say(
            f"{hidden:.2f} s of the data's start were hidden behind importing torch ({torch_s:.2f} s) and building the "
            f"model ({build_s:.2f} s)"
        )

    # Besides stepping

    def _evaluate(self) -> None:
        assert self._validation is not None
        count = self._options.eval_batches
        with self._begun.telemetry.pause("eval"):
            try:
                turn = self._validation.next(
                    self._step, count, stopping=self._begun.signals.came is not None
                )
            except FeedStopped as error:
                self._console.say(f"WARNING: no evaluation after step {self._step}: {error.reason}")
                self._begun.heartbeat.event("eval_skipped", reason=error.reason)
                return
            if turn.stop:
                return  # the next step will find out, and save
            loss = self._trainer.evaluate(turn.batches)
            self._validation.rewind()
        self._begun.heartbeat.event("eval", loss=loss, batches=count)
        self._console.say(f"step {self._step}: validation loss {loss:.4f}")

    def _save(self) -> bool:
        """True if a checkpoint of this step is on disk."""
        if self._saved_at == self._step:
            return True
        trainer = self._trainer
        own = {"data": self._begun.feed.state_dict(), "rng": rng_state()}
        began = time.perf_counter()
        try:
            with self._begun.telemetry.pause("checkpoint"):
                folder = self._checkpoints.save(
                    self._step,
                    trainer.model,
                    trainer.optimizer,
                    {"scheduler": trainer.scheduler},
                    own,
                    self._shape(),
                )
        except SaveFailed as error:
            # The older ones are still good, and the next try may be better: training goes on.
            self._console.say(f"WARNING: not saved: {error}")
            self._begun.heartbeat.event("save_failed", error=str(error))
            return False
        self._saved_at = self._step
        self._begun.heartbeat.event(
            "saved", folder=str(folder), seconds=round(time.perf_counter() - began, 6)
        )
        return True

    # The end

    def _finish(self, stopped: bool, elapsed: float) -> int:
        begun, options, console = self._begun, self._options, self._console
        saved = self._save() if (stopped or options.save_last) and self._last is not None else True
        console.end()
        if self._last is not None:
            self._summary(elapsed)
        if stopped:
            came = begun.signals.came
            console.say(
                f"told to stop ({came.name if came is not None else 'by another rank'}) at step {self._step}: "
                + (
                    "NOT saved"
                    if not saved
                    else "saved; go on with --resume"
                    if self._saved_at == self._step
                    else "nothing to save"
                )
            )
        begun.heartbeat.close("stopped" if stopped else "end")
        self._place.peers.gather([1])  # all heartbeats are closed
        if options.report is not None and self._place.first:
            self._report()
        if not saved:
            return 1
        return begun.signals.exit_code

    def _summary(self, elapsed: float) -> None:
        world, consumer = self._place.peers.world, self._begun.telemetry.consumer
        assert self._last is not None
        self._console.metrics(
            loss=float(self._last.loss),
            tokens_per_s=world * sum(self._tokens) / elapsed,
            batch=world * self._begun.batch_size * self._begun.accumulate,
            data_wait=consumer.data_wait(time.perf_counter()),
            elapsed_s=elapsed,
        )
        first = self._step - len(self._times) + 1
        for line in steady_lines(
            self._times, self._waits, self._tokens, self._compiled, world=world, first=first
        ):
            self._console.say(line)
        if substituted := sum(
            each.last - each.first + 1 for each in self._begun.feed.substitutions
        ):
            self._console.say(f"WARNING: {substituted} steps ran on SYNTHETIC data")

    def _report(self) -> None:
        from penstock.watch.report import report

        folder = self._options.out
        page = (
            folder / "report.html"
            if self._options.report == "auto"
            else Path(str(self._options.report)).expanduser()
        )
        try:
            self._console.say(f"report: {report(str(folder)).write(page).absolute()}")
        except (PenstockError, OSError) as error:
            self._console.say(f"WARNING: no report: {error}")
