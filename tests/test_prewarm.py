"""A prewarm leaves no trace: training after it is, to the last bit, training without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import ConfigError
from penstock.train.prewarm import Prewarmed, prewarm

VOCABULARY = 23
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and two threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Dropout, BatchNorm, ReLU (whose gradients hold -0.0), a frozen layer, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(8, VOCABULARY)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        with torch.no_grad():
            self.hidden.weight[0, :4] = -0.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.numel()
        x = torch.relu(self.hidden(self.embedding(inputs)))
        x = self.norm(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()
        return self.out(self.dropout(self.frozen(x)))


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (n, 3, 6), generator=generator)
    # Inputs and targets share rows of one id more, as they do in a loader.
    return [(rows[:, :-1], rows[:, 1:]) for rows in ids]


def seed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def bits(value: Any) -> Any:
    """A picture of a value in which every bit counts."""
    if isinstance(value, Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        kind = f"{value.dtype} {tuple(value.shape)}"
        return kind, value.detach().contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items()}
    return repr(value)


def picture(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    facts: dict[str, Any] = {name: bits(p) for name, p in model.named_parameters()}
    facts |= {f"buffer {name}": bits(b) for name, b in model.named_buffers()}
    facts |= {f"grad {name}": bits(p.grad) for name, p in model.named_parameters()}
    facts |= {f"mode {name}": m.training for name, m in model.named_modules()}
    facts |= {f"requires_grad {name}": p.requires_grad for name, p in model.named_parameters()}
    if optimizer is not None:
        for i, group in enumerate(optimizer.param_groups):
            facts |= {
                f"group {i} {key}": bits(value) for key, value in group.items() if key != "params"
            }
            for j, p in enumerate(group["params"]):
                facts[f"state {i} {j}"] = bits(dict(optimizer.state.get(p, {})))
    facts["draws"] = (random.random(), np.random.rand(), bits(torch.rand(2)))
    return facts


def train(
    make: Make,
    *,
    warmed: bool,
    steps: int = 5,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    seed()
    net = Net()
    optimizer = make(net.parameters())
    model: Any = net if backend is None else torch.compile(net, backend=backend)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i)
    data = batches(steps * accumulate)
    if warmed:
        done = prewarm(model, optimizer, data[0], accumulate=accumulate, autocast=autocast)
        assert done.passes == accumulate
    for i in range(steps):
        for inputs, targets in data[i * accumulate : (i + 1) * accumulate]:
            with torch.autocast(
                "cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None
            ):
                logits = model(inputs)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return picture(net, optimizer)


def groups(parameters: Any) -> list[dict[str, Any]]:
    parameters = list(parameters)
    return [{"params": parameters[:3], "weight_decay": 0.0, "lr": 0.02}, {"params": parameters[3:]}]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-lr-tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "adamw-groups": lambda p: torch.optim.AdamW(groups(p), lr=0.01, weight_decay=0.1),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert [name for name in one | other if one.get(name) != other.get(name)] == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_after_a_prewarm_are_those_without_it(name: str) -> None:
    assert_same(train(OPTIMIZERS[name], warmed=False), train(OPTIMIZERS[name], warmed=True))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_every_way_to_train_is_the_same_after_a_prewarm(
    backend: str | None, accumulate: int, autocast: torch.dtype | None
) -> None:
    how = {"backend": backend, "accumulate": accumulate, "autocast": autocast}
    plain, warm = (train(OPTIMIZERS["adamw-fused"], warmed=w, **how) for w in (False, True))
    assert_same(plain, warm)


def ready(
    make: Make = OPTIMIZERS["adamw"],
) -> tuple[Net, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    seed()
    net = Net()
    return net, make(net.parameters()), batches(1)[0]


def unchanged(
    net: nn.Module, optimizer: torch.optim.Optimizer | None, action: Callable[[], Any]
) -> Any:
    """Do something, and see that nothing but the state of a fresh optimizer is another than before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def look() -> dict[str, Any]:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        return picture(net, optimizer)

    before = look()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    result = action()
    assert random.getstate() == states[0]
    assert repr(np.random.get_state()) == repr(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    after = look()
    made = [name for name in after if name.startswith("state ") and before[name] == {}]
    assert_same(
        {k: v for k, v in before.items() if k not in made},
        {k: v for k, v in after.items() if k not in made},
    )
    return result


def test_the_result_says_what_was_done() -> None:
    net, optimizer, batch = ready()
    done: Prewarmed = unchanged(
        net, optimizer, lambda: prewarm(net, optimizer, batch, accumulate=2)
    )
    frozen = ("frozen", "unused")
    used = [p for name, p in net.named_parameters() if not name.startswith(frozen)]
    counts = sum(state["step"].nbytes for state in optimizer.state.values())
    assert done.state_bytes == sum(p.nbytes for p in used) * 2 + counts
    tensors = [*net.parameters(), *net.buffers(), *batch]
    assert done.copied_bytes == sum(tensor.nbytes for tensor in tensors)
    assert (done.passes, done.skipped) == (2, {})
    assert done.seconds > 0
    for state in optimizer.state.values():
        assert all(float(value.abs().sum()) == 0 for value in state.values())


def test_an_optimizer_with_state_is_left_alone() -> None:
    net, optimizer, batch = ready()
    prewarm(net, optimizer, batch)
    done = unchanged(net, optimizer, lambda: prewarm(net, optimizer, batch))
    assert done.skipped == {"optimizer": "AdamW already has state"}


@pytest.mark.parametrize("name", ["adafactor", "asgd", "rprop", "sgd-dampening"])
def test_an_optimizer_whose_first_state_is_unknown_is_not_stepped(name: str) -> None:
    net, optimizer, batch = ready(OPTIMIZERS[name])
    done = unchanged(net, optimizer, lambda: prewarm(net, optimizer, batch))
    assert "is not known" in done.skipped["optimizer"]
    assert len(optimizer.state) == 0


def test_hooks_and_schedulers_of_the_optimizer_do_not_notice() -> None:
    net, optimizer, batch = ready()
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = repr(scheduler.state_dict())
    prewarm(net, optimizer, batch)
    assert steps == []
    assert repr(scheduler.state_dict()) == before
    with pytest.warns(UserWarning, match="Detected call of `lr_scheduler.step"):
        scheduler.step()  # no step was taken yet


def test_gradients_that_were_there_are_there_again() -> None:
    net, optimizer, batch = ready()
    net.out.weight.grad = torch.full_like(net.out.weight, -0.0)
    net.unused.weight.grad = torch.ones_like(net.unused.weight)
    held = net.out.weight.grad
    unchanged(net, optimizer, lambda: prewarm(net, optimizer, batch))
    assert net.out.weight.grad is held
    assert net.hidden.weight.grad is None


class Keeps(nn.Module):
    """Keeps state outside of its parameters and buffers, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("rebound", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.plain = torch.zeros(3)
        self.count = 0
        self.seen: list[int] = []
        self.table: dict[str, int] = {}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.line(x * 1)
        x.zero_()
        self.plain += 1
        self.rebound = self.rebound + 1
        self.count += 1
        self.seen.append(1)
        self.table["calls"] = self.count
        self.late = 1
        return {"loss": out.sum(), "logits": out}


def test_attributes_of_modules_and_the_batch_are_restored() -> None:
    net, x = Keeps(), torch.ones(2, 4)
    rebound, attributes = net.rebound, set(vars(net))
    for batch in ((x, torch.zeros(2)), [x, torch.zeros(2)], {"x": x}, {"x": x, "labels": x}):
        prewarm(net, torch.optim.AdamW(net.parameters()), batch)
        assert bool((x == 1).all())
        assert net.rebound is rebound
        assert (net.count, net.seen, net.table) == (0, [], {})
        assert set(vars(net)) == attributes
        assert not net.plain.any()


@pytest.mark.parametrize("form", ["scalar", "logits", "object"])
def test_the_loss_is_found_in_what_a_model_returns(form: str) -> None:
    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Tensor) -> Any:
            logits = self.net(inputs)
            loss = logits.mean()
            forms = {"scalar": loss, "object": Output(loss)}
            return forms.get(form, logits)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert prewarm(model, optimizer, batches(1)[0]).state_bytes > 0


@pytest.mark.parametrize("where", ["forward", "backward", "second"])
def test_after_an_exception_everything_is_as_it_was(where: str) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("in the middle")

    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        calls.append(1)
        if where == "forward" or (where == "second" and len(calls) == 2):
            raise ZeroDivisionError("in the middle")
        return Breaks.apply(value) if where == "backward" else value

    net, optimizer, batch = ready()
    net.out.weight.grad = torch.ones_like(net.out.weight)

    def action() -> None:
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            prewarm(net, optimizer, batch, loss=loss, steps=2)

    unchanged(net, optimizer, action)
    assert len(optimizer.state) == 0


def lazy() -> tuple[Any, ...]:
    return nn.LazyLinear(4), None, (torch.ones(2, 4), None)


def steps_in_backward() -> tuple[Any, ...]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.hidden.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return net, None, batches(1)[0]


def renormalized() -> tuple[Any, ...]:
    net = nn.Sequential(nn.Embedding(VOCABULARY, 4, max_norm=0.1), nn.Linear(4, VOCABULARY))
    return net, None, batches(1)[0]


def extra_state() -> tuple[Any, ...]:
    class Extra(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    return nn.Sequential(Extra(4, 4)), None, (torch.ones(2, 4), None)


def sparse_buffer() -> tuple[Any, ...]:
    net = nn.Linear(4, 4)
    net.register_buffer("table", torch.eye(4).to_sparse())
    return net, None, (torch.ones(2, 4), None)


def frozen() -> tuple[Any, ...]:
    return nn.Linear(4, 4).requires_grad_(False), None, (torch.ones(2, 4), None)


def foreign() -> tuple[Any, ...]:
    return Net(), torch.optim.AdamW(nn.Linear(2, 2).parameters()), batches(1)[0]


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "lazy": (lazy, r"'weight' has no shape yet"),
    "hook": (steps_in_backward, r"writes to parameter '.*', perhaps in a hook"),
    "max-norm": (renormalized, r"writes to parameter '0.weight'"),
    "extra-state": (extra_state, r"'0' is a Extra: its extra state cannot be restored"),
    "sparse": (sparse_buffer, r"'table' is a Tensor of torch.sparse_coo"),
    "frozen": (frozen, r"no parameter requires a gradient"),
    "foreign": (foreign, r"AdamW has parameters that the model lacks"),
    "no-optimizer": (lambda: (Net(), "adamw", batches(1)[0]), r"optimizer is a str"),
    "no-model": (lambda: (len, None, batches(1)[0]), r"model is a builtin_function_or_method"),
    "no-loss": (
        lambda: (nn.Linear(4, 4), None, (torch.ones(2, 4), None)),
        r"neither a loss nor logits",
    ),
    "bad-batch": (lambda: (Net(), None, torch.ones(2)), r"batch is a Tensor"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_restored_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    net, optimizer, batch = make()
    with pytest.raises(ConfigError, match=reason):
        prewarm(net, optimizer, batch)


def test_arguments_and_losses_that_do_not_fit_are_refused() -> None:
    net, optimizer, batch = ready()
    for name in ("steps", "accumulate"):
        with pytest.raises(ConfigError, match=f"{name}=0: must be an integer ≥ 1"):
            prewarm(net, optimizer, batch, **{name: 0})
    for loss in (lambda model, batch: model(batch[0]), lambda model, batch: torch.zeros(())):
        with pytest.raises(ConfigError, match="the loss must be a tensor with one element that"):
            prewarm(net, optimizer, batch, loss=loss)
    assert len(optimizer.state) == 0
