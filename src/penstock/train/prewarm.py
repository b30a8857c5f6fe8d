"""Take the cost of a first training step before the first step, without changing a bit.

In:    a model, its optimizer, and a batch of the shape that training will have.
Out:   the same model and optimizer, with kernels loaded, graphs compiled, buckets built and optimizer state made.
Where: the trainer's thread, before the first step; in DDP and FSDP on all ranks at once.
State: none afterwards. While it runs, copies of the buffers and of gradients that were there already.
Cost:  what it takes off the first step; it saves time only where that waits for something else, such as data.

See docs/prewarm.md for what is promised, what is refused, and how to prove it on a model of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtra

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from penstock.train.prewarm_pass import Autocast, Loss

    Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What a prewarm did."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    total_s: float
    """All of it, copies and checks included."""
    passes: int
    """Forward and backward passes, micro-steps counted."""
    state_bytes: int
    """Optimizer state that was made and stays; on this rank."""
    copied_bytes: int
    """Parameters that were copied for a while, because something might have changed them; on this rank."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not done, and why."""


@dataclass(frozen=True, slots=True)
class How:
    """How to warm: the options of `prewarm`."""

    loss: Loss | None
    steps: int
    accumulate: int
    autocast: Autocast
    scheduler: Any
    scaler: Any
    copy_parameters: bool
    rebuild_buckets: bool | None


def prewarm(
    model: nn.Module,
    optimizer: Optimizers,
    batch: Any,
    *,
    loss: Loss | None = None,
    steps: int = 1,
    accumulate: int = 1,
    autocast: Autocast = None,
    scheduler: Any = None,
    scaler: Any = None,
    copy_parameters: bool = False,
    rebuild_buckets: bool | None = None,
) -> Prewarmed:
    """Run forward, backward and optimizer once, and leave everything as it was to the last bit.

    `batch` is (inputs, targets), a Batch or a mapping of what the model takes. It is copied, so that any
    will do: the first one of the loader, which is trained on afterwards, or zeros of the same shape.

    `loss` is a callable of model and batch; without it, what the model returns as its loss, or cross
    entropy of its logits. `optimizer` may be several, or None. `accumulate` micro-steps make a step;
    `autocast` is a dtype or a context manager; `scaler` and `scheduler` are those of the training loop.

    `steps`: more than one where something is warm only later (some modes of torch.compile). Each costs a step.
    `copy_parameters`: for a model that writes to its own parameters. Costs their memory once more.
    `rebuild_buckets`: whether DDP builds its final buckets now, which takes a pass more. None: where that changes no bit.
    With three ranks or more it changes the order in which the gradients of the first real step are added up.
    """
    how = How(
        loss, steps, accumulate, autocast, scheduler, scaler, copy_parameters, rebuild_buckets
    )
    done: Prewarmed = _run().prewarm(model, optimizer, batch, how)
    return done


def verify_prewarm(
    model: nn.Module,
    optimizer: Optimizers,
    batch: Any,
    *,
    loss: Loss | None = None,
    steps: int = 1,
    accumulate: int = 1,
    autocast: Autocast = None,
    scheduler: Any = None,
    scaler: Any = None,
    copy_parameters: bool = False,
    rebuild_buckets: bool | None = None,
    real_steps: int = 3,
    warm: Callable[[], Any] | None = None,
) -> None:
    """Prove on this very model that a prewarm changes nothing, or raise a ConfigError that names what it changed.

    Bit by bit: everything before and after it, and then `real_steps` real steps on `batch` after it against
    the same steps without it. Afterwards everything is as it was, and an optimizer that had no state has none.
    Needs about four times the memory of parameters, buffers and optimizer state: for a small twin of the
    real thing, or a machine with room. `warm` is called in place of `prewarm`, to put something else to the test.
    """
    how = How(
        loss, steps, accumulate, autocast, scheduler, scaler, copy_parameters, rebuild_buckets
    )
    _run().verify_prewarm(model, optimizer, batch, how, real_steps, warm)


def _run() -> Any:
    """Imported when it is needed: torch takes seconds, and may not be there."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtra("torch", "prewarm()", "torch") from error
    from penstock.train import prewarm_run

    return prewarm_run
