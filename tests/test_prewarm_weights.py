"""Weights survive a prewarm; where they cannot, it says so, and blames the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ConfigError
from penstock.train.prewarm import prewarm, verify_prewarm

KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "SGD")


def total(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).sum()


def raw(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_two_bytes_keep_their_bits(kind: str, dtype: torch.dtype, foreach: bool) -> None:
    net = nn.Linear(4, 4).to(dtype)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.01, foreach=foreach)
    settings = {
        name: value for name, value in optimizer.param_groups[0].items() if name != "params"
    }
    before = raw(net.weight)
    x = torch.ones(2, 4, dtype=dtype)
    prewarm(net, optimizer, (x, x), loss=total)
    assert raw(net.weight) == before
    assert {
        name: value for name, value in optimizer.param_groups[0].items() if name != "params"
    } == settings
    assert all(
        not value.any()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_float16_after_a_prewarm_are_those_without_it(kind: str) -> None:
    net = nn.Linear(4, 4).half()
    optimizer = getattr(torch.optim, kind)(
        net.parameters(), lr=0.01, **({"eps": 1e-4} if kind != "SGD" else {})
    )
    x = torch.ones(2, 4).half()
    verify_prewarm(net, optimizer, (x, x), loss=total)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "negates": lambda w: w.neg_(),
    "sorts": lambda w: w.copy_(w.sort().values),
    "rolls": lambda w: w.copy_(w.roll(1)),
    "reverses": lambda w: w.copy_(w.flip(0)),
    "swaps-two": lambda w: w[:2].copy_(w[:2].flip(0)),
    "halves": lambda w: w.mul_(0.5),
}


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1, -2, 3, -4], dtype=dtype))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.w)
        return (self.w * x).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_a_model_that_moves_its_weights_about_is_found_out(name: str, dtype: torch.dtype) -> None:
    net = Writes(WRITES[name], dtype)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = (torch.ones(4, dtype=dtype), None)
    before = raw(net.w)
    prewarm(net, optimizer, batch, copy_parameters=True)
    assert raw(net.w) == before
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(
        ConfigError, match=r"the model writes to its parameter 'w'.*copy_parameters=True"
    ):
        prewarm(net, optimizer, batch)
    assert len(optimizer.state) == 0, "nothing of it stays, but for the weights"
    assert net.w.grad is None
