"""The small GPT: what a token may see, what counts in the loss, and that it is the same model wherever it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from penstock.train.model import GPT, SIZES, Shape, count_parameters, loss, parameter_groups
from penstock.types import IGNORE

TINY = Shape(layers=2, width=32, heads=2)
VOCABULARY = 50  # not a multiple of 64: the embedding has rows that stand for no id
SEQ_LEN = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and two threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(seed: int = 0, dropout: float = 0.0, shape: Shape = TINY) -> GPT:
    """With larger weights than at the start of training, so that what a token sees shows in its logits."""
    torch.manual_seed(seed)
    gpt = GPT(shape, VOCABULARY, SEQ_LEN, dropout)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return gpt


def ids(*size: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(seed))


def documents(*rows: list[int]) -> tuple[Tensor, Tensor]:
    """`positions` and `cu_seqlens` of rows that hold documents of these lengths."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    ends = torch.tensor([n for lengths in rows for n in lengths]).cumsum(0)
    return positions, torch.cat([torch.zeros(1), ends]).to(torch.int32)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("at", [0, 7, SEQ_LEN - 1])
def test_a_token_changes_no_logit_before_it(at: int, packed: bool) -> None:
    gpt, inputs = model(), ids(2, SEQ_LEN)
    extras = documents([SEQ_LEN], [SEQ_LEN]) if packed else ()
    changed = inputs.clone()
    changed[:, at] = (changed[:, at] + 1) % VOCABULARY
    before, after = gpt(inputs, *extras), gpt(changed, *extras)
    assert_close(after[:, :at], before[:, :at])
    assert (after[:, at:] - before[:, at:]).abs().amax(dim=-1).min() > 1e-3


def test_documents_of_a_row_get_the_logits_they_get_alone() -> None:
    gpt, inputs = model(), ids(2, SEQ_LEN)
    packed = gpt(inputs, *documents([5, 11], [9, 7]))
    for row, (begin, end) in [(0, (0, 5)), (0, (5, 16)), (1, (0, 9)), (1, (9, 16))]:
        assert_close(packed[row, begin:end], gpt(inputs[row : row + 1, begin:end])[0])


def test_rotation_follows_the_positions() -> None:
    gpt, inputs = model(), ids(1, SEQ_LEN)
    _, whole = documents([SEQ_LEN])  # one document for the mask, so that only the rotation can tell
    restarting, _ = documents([5, 11])
    counted = gpt(inputs, torch.arange(SEQ_LEN).unsqueeze(0), whole)
    assert_close(counted, gpt(inputs))
    restarted = gpt(inputs, restarting, whole)
    assert_close(restarted[:, :5], counted[:, :5])
    assert (restarted[:, 5:] - counted[:, 5:]).abs().amax(dim=-1).min() > 1e-3


def test_the_loss_is_a_sum_over_the_targets_that_count() -> None:
    logits, targets = torch.zeros(2, 3, VOCABULARY), ids(2, 3)
    targets[0, 0] = targets[1, 2] = IGNORE
    logits[0, 0] = torch.randn(VOCABULARY) * 100
    total, count = loss(logits, targets)
    assert count.item() == 4
    assert total.item() == pytest.approx(4 * math.log(VOCABULARY))


def test_the_loss_of_nothing_is_zero_and_has_a_gradient() -> None:
    gpt = model()
    total, count = loss(gpt(ids(1, 4)), torch.full((1, 4), IGNORE))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    gradient = gpt.embedding.weight.grad
    assert gradient is not None
    assert not gradient.any()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("toy", 0.4e6, 0.5e6),
        ("mini", 2.8e6, 3.3e6),
        ("small", 24e6, 27e6),
        ("medium", 57e6, 63e6),
        ("125m", 84e6, 86e6),
    ],
)
def test_a_size_has_the_parameters_that_it_says(name: str, low: float, high: float) -> None:
    with torch.device("meta"):
        gpt = GPT.from_size(name, vocab_size=50_257, seq_len=1024)
    embedding = gpt.embedding.weight.numel()
    assert embedding == 50_304 * SIZES[name].width
    assert low <= count_parameters(gpt) - embedding <= high


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_ddp(gpt: GPT) -> nn.Module:
    return DistributedDataParallel(gpt)


def in_fsdp(gpt: GPT) -> nn.Module:
    for block in gpt.blocks:
        fully_shard(block)
    fully_shard(gpt)
    return gpt


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [in_ddp, in_fsdp])
def test_it_trains_the_same_wrapped_and_sharded(wrap: Callable[[GPT], nn.Module]) -> None:
    plain, rows, extras = model(), ids(2, SEQ_LEN + 1), documents([5, 11], [9, 7])
    wrapped = wrap(model())
    losses: list[list[float]] = []
    for gpt in (plain, wrapped):
        optimizer = torch.optim.AdamW(parameter_groups(gpt, 0.1), lr=1e-2)
        losses.append([])
        for _ in range(4):
            total, count = loss(gpt(rows[:, :-1], *extras), rows[:, 1:])
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(total.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert count_parameters(wrapped) == count_parameters(plain)
    assert [len(g["params"]) for g in parameter_groups(wrapped, 0.1)] == [
        len(g["params"]) for g in parameter_groups(plain, 0.1)
    ]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own, while it imports its compiler
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # torch's own, which it hides from all but errors
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
def test_blocks_compiled_whole_give_the_same_numbers(
    packed: bool, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes of its own
    plain, compiled, inputs = model(), model(), ids(2, SEQ_LEN)
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend=backend)
    extras = documents([5, 11], [9, 7]) if packed else ()
    logits = [gpt(inputs, *extras) for gpt in (plain, compiled)]
    assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    for each in logits:
        loss(each, inputs)[0].backward()
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    assert list(compiled.state_dict()) == list(plain.state_dict())
