"""Take the cost of a first training step before the first step, without changing a bit.

Imports torch only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import missing_extra

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What a prewarm did."""

    seconds: float
    passes: int
    """Forward and backward passes."""
    state_bytes: int
    """Optimizer state that was made, on this rank."""
    copied_bytes: int
    """Tensors that were copied for the time of the prewarm, on this rank."""
    skipped: dict[str, str]
    """What was not done, and why."""


def prewarm(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    batch: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int = 1,
    accumulate: int = 1,
    autocast: dtype | None = None,
) -> Prewarmed:
    """Run a training step and leave everything as it was, to the last bit.

    Afterwards kernels are loaded, graphs compiled, DDP's buckets built and optimizer state made.
    Parameters, buffers, gradients, modes, attributes of modules and random numbers are unchanged. The
    optimizer itself is not stepped: a twin is, and its state, set to what a first step begins with, is
    handed over.

    optimizer: one, several, or None for the model alone. One that has state is left alone.
    batch: (inputs, targets), a Batch, or a mapping of what the model takes. Only its shapes matter.
    loss: a function of model and batch. Defaults to the loss that the model returns, or to the cross
        entropy of its logits.
    steps: more than 1 if something is warm only later, as in some modes of torch.compile.
    accumulate: micro-steps of a step. autocast: a dtype such as torch.bfloat16.
    """
    try:
        from penstock.train.prewarm_step import run_step
    except ImportError as error:
        raise missing_extra("torch", "prewarm()", "torch") from error
    return run_step(model, optimizer, batch, loss, steps, accumulate, autocast)
