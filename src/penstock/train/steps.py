"""A training step: micro-steps, gradients, optimizer, schedule.

In:    a step's batches of this rank.
Out:   the mean loss over all ranks, the gradient's length.
Where: the trainer's thread.
State: model, optimizer and schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.encode.batch import Batch
from penstock.train import distributed
from penstock.train.distributed import Place
from penstock.train.model import GPT, count_parameters, loss, parameter_groups
from penstock.train.options import LEARNING_RATE, TrainOptions

SEEDS = 1 << 63
"""How many torch has."""


@dataclass(slots=True)
class Done:
    """What a step did. Tensors, because to read them would wait for a device."""

    loss: torch.Tensor
    """The mean over all targets of all ranks."""
    grad_norm: torch.Tensor
    tokens: int
    """Of this rank."""
    lr: float


def schedule(rise: int, steps: int | None, floor: float) -> Callable[[int], float]:
    """The learning rate's factor at a step: a straight rise, then a cosine down to the floor, where the end is known."""

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / (rise + 1)
        if steps is None:
            return 1.0
        share = min(1.0, (step - rise) / max(1, steps - rise))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return factor


class Trainer:
    """Model, optimizer and schedule, on this rank."""

    def __init__(
        self,
        options: TrainOptions,
        place: Place,
        *,
        vocab_size: int,
        seq_len: int,
        seed: int,
        lr: float | None,
        steps: int | None,
    ) -> None:
        """`steps`: where the learning rate's cosine ends; None where the end is not known beforehand."""
        torch.manual_seed(seed % SEEDS)  # the same weights on all ranks
        self.place, self._clip = place, options.clip
        self.dtype = distributed.computes_in(options, place.device)
        model = GPT.from_size(options.size, vocab_size, seq_len, dropout=options.dropout).to(
            place.device
        )
        if options.compile:
            for block in model.blocks:
                block.compile()
        self.parameter_count = count_parameters(model)
        self.model = distributed.spread(model, place, self.dtype)
        # One kernel for all parameters. FSDP2's are DTensors, for which it is not everywhere to be had on CPUs.
        fused = place.device.type == "cuda" or place.parallel != "fsdp"
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, options.weight_decay),
            lr=LEARNING_RATE if lr is None else lr,
            betas=(0.9, 0.95),
            fused=fused,
        )
        rise = min(100, (steps or 1000) // 10) if options.lr_warmup is None else options.lr_warmup
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, schedule(rise, steps, options.lr_floor)
        )
        # Each rank drops its own activations.
        torch.manual_seed((seed + 1 + place.peers.rank) % SEEDS)

    def step(self, batches: Sequence[Batch]) -> Done:
        """Train on a step's batches."""
        ids = sum(batch.targets.numel() for batch in batches)
        told = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        for n, batch in enumerate(batches):
            with distributed.synchronising(self.model, n == len(batches) - 1):
                summed, counted = self._loss(self.model, batch)
                (summed / ids).backward()
            told += torch.stack((summed.detach().double(), counted.double()))
        distributed.add_up(told, self.place)
        # Gradients are a mean over ids, and over ranks. Where some are padding, it has to be one over targets.
        self._scale((ids * self.place.peers.world / told[1]).float())
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self._clip if self._clip > 0 else math.inf
        )
        rate = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Done(
            told[0] / told[1], distributed.whole(norm), sum(batch.tokens for batch in batches), rate
        )

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self.computing():
            return loss(model(batch.inputs, batch.positions, batch.cu_seqlens), batch.targets)

    def computing(self) -> AbstractContextManager[Any]:
        """Mixed precision, where there is any."""
        return distributed.computing(self.place, self.dtype)

    def mean_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of one batch, as a number to go backwards from: for `prewarm`."""
        summed, counted = self._loss(model, batch)
        return summed / counted

    def _scale(self, factor: torch.Tensor) -> None:
        gradients = [
            distributed.local(p.grad) for p in self.model.parameters() if p.grad is not None
        ]
        torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The mean loss over batches that all ranks have as many of, without training on them."""
        told = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        model = distributed.bare(self.model)  # DDP has nothing to add up here
        model.eval()
        try:
            for batch in batches:
                summed, counted = self._loss(model, batch)
                told += torch.stack((summed.double(), counted.double()))
        finally:
            model.train()
        distributed.add_up(told, self.place)
        return float(told[0] / told[1])
