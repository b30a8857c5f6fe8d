"""What a module holds is as it was after a prewarm, whatever kind of tensor, array or generator it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import ConfigError
from penstock.train.prewarm import prewarm, verify_prewarm

BATCH = {"x": torch.ones(2, 4)}

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning"
    ),  # torch's own: many of these kinds are called experimental
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Holds(nn.Module):
    """Keeps a value, and does something to it in each pass."""

    def __init__(self, value: Any, change: Callable[[Any], Any], *, buffer: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.change = change
        if buffer:
            self.register_buffer("value", value)
        else:
            self.value = value

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self.value)
        return self.line(x).sum()


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Any]
    change: Callable[[Any], Any]
    look: Callable[[Any], Any]
    """A picture of it that `change` changes."""


def quantized(scale: float) -> Tensor:
    return torch.quantize_per_tensor(torch.tensor([1.0, -2.0, 3.0]), scale, 0, torch.qint8)


def by_channel(dtype: torch.dtype, zero: Tensor) -> Tensor:
    return torch.quantize_per_channel(torch.eye(4), torch.full((4,), 0.5), zero, 0, dtype)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), -0.0)], layout=layout)


def twice(value: Tensor) -> Tensor:
    return value.mul_(2)


def numbers(value: Tensor) -> str:
    return repr(value.to_dense().tolist())


def coo_parts(value: Tensor) -> str:
    return repr([value._indices().tolist(), value._values().tolist(), value.is_coalesced()])


def coo(places: list[list[int]], values: list[float], shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(places), torch.tensor(values), shape)


TENSORS = {
    "quantized": Kind(
        lambda: quantized(0.1), lambda q: q.copy_(torch.zeros(3)), lambda q: q.int_repr().tolist()
    ),
    "quantized-anew": Kind(
        lambda: quantized(0.1), lambda q: q.copy_(quantized(0.5)), lambda q: (q.q_scale(), str(q))
    ),
    "quantized-by-channel": Kind(
        lambda: by_channel(torch.quint8, torch.zeros(4, dtype=torch.int64)),
        lambda q: q.copy_(torch.zeros(4, 4)),
        lambda q: q.int_repr().tolist(),
    ),
    "four-bits": Kind(
        lambda: by_channel(torch.quint4x2, torch.zeros(4)),
        lambda q: torch.empty(0, dtype=torch.uint8).set_(q.untyped_storage()).fill_(7),
        lambda q: q.untyped_storage().tolist(),
    ),
    "coo": Kind(lambda: torch.eye(3).to_sparse(), lambda v: v._values().mul_(2), coo_parts),
    "coo-that-grows": Kind(
        lambda: torch.eye(3).to_sparse(),
        lambda v: v.add_(coo([[0], [1]], [5.0], (3, 3))),
        coo_parts,
    ),
    "coo-twice-at-a-place": Kind(
        lambda: coo([[1, 1]], [1.0, 2.0], (3,)), lambda v: v._values().mul_(2), coo_parts
    ),
    "csr": Kind(lambda: torch.eye(4).to_sparse_csr(), lambda v: v.values().mul_(2), numbers),
    "csc": Kind(lambda: torch.eye(4).to_sparse_csc(), lambda v: v.values().mul_(2), numbers),
    "bsr": Kind(lambda: torch.eye(4).to_sparse_bsr((2, 2)), lambda v: v.values().mul_(2), numbers),
    "bsc": Kind(lambda: torch.eye(4).to_sparse_bsc((2, 2)), lambda v: v.values().mul_(2), numbers),
    "nested": Kind(
        lambda: nested(torch.strided),
        lambda v: v.fill_(3),
        lambda v: [t.tolist() for t in v.unbind()],
    ),
    "jagged": Kind(
        lambda: nested(torch.jagged), lambda v: v.values().fill_(3), lambda v: v.values().tolist()
    ),
    "mkldnn": Kind(lambda: torch.ones(2, 2).to_mkldnn(), twice, numbers),
    "negated-view": Kind(
        lambda: torch.ones(3, dtype=torch.cfloat).mul_(1j).conj().imag, twice, numbers
    ),
    "conjugate": Kind(lambda: torch.full((3,), 1 + 2j).conj(), twice, numbers),
    "repeated": Kind(
        lambda: torch.ones(1).expand(4), lambda v: v.as_strided((1,), (1,)).mul_(2), numbers
    ),
    "given-other-memory": Kind(
        lambda: torch.ones(3), lambda v: setattr(v, "data", torch.zeros(5)), numbers
    ),
}


@pytest.mark.parametrize("buffer", [False, True], ids=["attribute", "buffer"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_every_kind_are_put_back(name: str, buffer: bool) -> None:
    kind = TENSORS[name]
    value = kind.make()
    before = kind.look(value)
    net = Holds(value, kind.change, buffer=buffer)
    prewarm(net, torch.optim.AdamW(net.parameters()), BATCH)
    assert net.value is value
    assert kind.look(value) == before
    kind.change(value)
    assert kind.look(value) != before, "or this test could not fail"


@pytest.mark.parametrize("buffer", [False, True], ids=["attribute", "buffer"])
@pytest.mark.parametrize("name", TENSORS)
def test_the_proof_can_be_had_beside_tensors_of_every_kind(name: str, buffer: bool) -> None:
    kind = TENSORS[name]
    value = kind.make()
    before = kind.look(value)
    net = Holds(value, kind.change, buffer=buffer)
    verify_prewarm(net, torch.optim.AdamW(net.parameters()), BATCH, real_steps=1)
    assert kind.look(value) == before


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "given-other-memory"])
def test_the_proof_sees_a_change_in_tensors_of_every_kind(name: str) -> None:
    kind = TENSORS[name]
    net = Holds(kind.make(), lambda _: None)
    with pytest.raises(ConfigError, match="attribute 'value' of module 'model' changed"):
        verify_prewarm(net, None, BATCH, warm=lambda: kind.change(net.value))


def test_a_tensor_without_memory_stays_without() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    net = Holds(freed, lambda _: None)
    verify_prewarm(net, torch.optim.AdamW(net.parameters()), BATCH, real_steps=1)
    assert freed.untyped_storage().nbytes() == 0


def test_a_tensor_that_cannot_be_looked_after_is_refused_by_name() -> None:
    from torch.masked import masked_tensor

    held = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    net = Holds(held, lambda _: None)
    with pytest.raises(
        ConfigError,
        match="attribute 'value' of module 'model' is a MaskedTensor whose memory cannot",
    ):
        prewarm(net, None, BATCH)
    with pytest.raises(ConfigError, match="'value' is a MaskedTensor whose memory cannot be seen"):
        prewarm(Holds(held, lambda _: None, buffer=True), None, BATCH)


def test_a_buffer_without_a_shape_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ConfigError, match=r"'1.running_mean' has no shape yet"):
        prewarm(net, None, BATCH)


def read_only() -> Any:
    array = np.arange(3)
    array.flags.writeable = False
    return array


def then_lock(array: Any) -> None:
    array += 1
    array.flags.writeable = False


OTHERS = {
    "locked-array": Kind(
        lambda: np.arange(3), then_lock, lambda a: (a.tolist(), a.flags.writeable)
    ),
    "masked-array": Kind(
        lambda: np.ma.array([1, 2], mask=[False, True]),
        lambda a: a.__setitem__(0, np.ma.masked),
        lambda a: str(a),
    ),
    "random-state": Kind(
        lambda: np.random.RandomState(1),
        lambda r: r.rand(),
        lambda r: str(r.get_state(legacy=False)),
    ),
    "bit-generator": Kind(lambda: np.random.PCG64(1), lambda r: r.random_raw(), lambda r: r.state),
}


@pytest.mark.parametrize("name", OTHERS)
def test_arrays_and_generators_are_put_back(name: str) -> None:
    kind = OTHERS[name]
    value = kind.make()
    before = kind.look(value)
    net = Holds(value, kind.change)
    prewarm(net, torch.optim.AdamW(net.parameters()), BATCH)
    assert net.value is value
    assert kind.look(value) == before


@pytest.mark.parametrize(
    "make",
    [
        read_only,
        lambda: np.broadcast_to(np.zeros(1), (3,)),
        lambda: np.array([object(), [1]], dtype=object),
    ],
    ids=["read-only", "broadcast", "objects"],
)
def test_arrays_that_are_only_read_are_in_nobodys_way(make: Callable[[], Any]) -> None:
    value = make()
    before = value.tolist()
    net = Holds(value, lambda _: None)
    verify_prewarm(net, torch.optim.AdamW(net.parameters()), BATCH, real_steps=1)
    assert net.value is value
    assert value.tolist() == before


def test_a_generator_without_a_state_is_passed_over() -> None:
    net = Holds(random.SystemRandom(), lambda r: r.random())
    prewarm(net, torch.optim.AdamW(net.parameters()), BATCH)
    assert isinstance(net.value, random.SystemRandom)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_batch_may_be_nested_and_is_not_touched(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    net = nn.Linear(4, 4)
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append([rows.tolist() for rows in batch["x"].unbind()])
        value = model(batch["x"].to_padded_tensor(0.0)).sum()
        batch["x"].unbind()[0].zero_()
        return value

    prewarm(net, None, {"x": x}, loss=loss)
    assert [rows.tolist() for rows in x.unbind()] == seen[0] == [[[1.0] * 4] * 2, [[1.0] * 4] * 3]
