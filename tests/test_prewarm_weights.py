"""Weights survive a prewarm; where they cannot, it says so, and blames the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ConfigError
from penstock.train import prewarm_optimizer
from penstock.train.prewarm import prewarm, verify_prewarm
from penstock.train.prewarm_bits import PIECE, checksum

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


@pytest.fixture
def flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not take the smallest numbers for zero")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_numbers_that_the_processor_takes_for_zero_keep_their_bits(dtype: torch.dtype) -> None:
    net = nn.Linear(4, 4).to(dtype)
    with torch.no_grad():
        net.weight.view(torch.int32 if dtype is torch.float32 else torch.int16)[0, :2] = (
            torch.tensor([5, 7])
        )
    before = raw(net.weight)
    x = torch.ones(2, 4, dtype=dtype)
    prewarm(net, torch.optim.AdamW(net.parameters()), (x, x), loss=total)
    assert raw(net.weight) == before


class Careless(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1)


def test_the_model_is_not_blamed_for_what_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        prewarm_optimizer.FRESH, Careless, {}
    )  # one that is known to be harmless, and is not
    net = nn.Linear(4, 4)
    optimizer = Careless(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(2, 4)
    with pytest.raises(
        ConfigError,
        match=r"an optimizer step with .* changed parameter 'weight'.*copy_parameters=True",
    ):
        prewarm(net, optimizer, (x, x), loss=total)
    assert len(optimizer.state) == 0
    before = raw(net.weight)
    prewarm(net, optimizer, (x, x), loss=total, copy_parameters=True)
    assert raw(net.weight) == before


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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.cfloat, torch.int8], ids=str
)
def test_a_checksum_sees_value_sign_and_order_across_its_pieces(dtype: torch.dtype) -> None:
    tensor = (torch.arange(3 * PIECE + 5) % 100 + 1).to(dtype)
    other_value, swapped = tensor.clone(), tensor.clone()
    other_value[PIECE + 1] = 0
    swapped[[3, 2 * PIECE + 3]] = tensor[[2 * PIECE + 3, 3]]
    twins = [
        tensor,
        -tensor,
        tensor.flip(0),
        tensor.roll(1),
        tensor.roll(PIECE),
        tensor.roll(PIECE // 2),
        other_value,
    ]
    twins += [swapped, tensor[:-1], tensor.view(-1, 1)]
    assert len({checksum(twin) for twin in twins}) == len(twins)
    assert checksum(tensor) == checksum(tensor.clone())


def test_a_checksum_is_that_of_the_memory_whatever_its_form() -> None:
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for tensor in (table.t(), table[:, 1], table[0, 0], table[:0], table[0].expand(3, 4)):
        before = checksum(tensor)
        assert checksum(tensor) == before
        if tensor.numel() > 0:
            table[0, 1 if tensor.dim() == 1 else 0] *= -1
            assert checksum(tensor) != before


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
@pytest.mark.parametrize("setting", ["steps", "accumulate", "real_steps"])
def test_a_count_that_is_none_is_refused_with_name_and_value(setting: str, value: Any) -> None:
    net = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with pytest.raises(
        ConfigError, match=rf"prewarm: {setting}={value!r} must be a whole number from 1 on"
    ):
        verify_prewarm(net, None, (x, x), loss=total, **{setting: value})
