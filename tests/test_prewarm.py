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
from penstock.train.prewarm import Prewarmed, prewarm, verify_prewarm

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

    def __init__(self, dropout: float = 0.3, batch_norm: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm: nn.Module = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
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
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().flatten().view(torch.uint8).tolist(),
        )
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
    dropout: float = 0.3,
    batch_norm: bool = True,
    schedule: bool = True,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    backend: str | None = None,
    prewarm_steps: int = 1,
) -> dict[str, Any]:
    seed()
    net = Net(dropout, batch_norm)
    optimizer = make(net.parameters())
    model: Any = net if backend is None else torch.compile(net, backend=backend)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i) if schedule else None
    data = batches(steps * accumulate)
    if warmed:
        done = prewarm(
            model,
            optimizer,
            data[0],
            accumulate=accumulate,
            autocast=autocast,
            scheduler=scheduler,
            steps=prewarm_steps,
        )
        assert done.passes == accumulate * prewarm_steps
    for i in range(steps):
        for inputs, targets in data[i * accumulate : (i + 1) * accumulate]:
            with torch.autocast(
                "cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None
            ):
                logits = model(inputs)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return picture(net, optimizer)


def groups(parameters: Any) -> list[dict[str, Any]]:
    parameters = list(parameters)
    return [{"params": parameters[:3], "weight_decay": 0.0, "lr": 0.02}, {"params": parameters[3:]}]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-fused-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=0.001, maximize=True),
    "adamw-lr-tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "adamw-groups": lambda p: torch.optim.AdamW(groups(p), lr=0.01, weight_decay=0.1),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-momentum-for-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert [name for name in one | other if one.get(name) != other.get(name)] == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_after_a_prewarm_are_those_without_it(name: str) -> None:
    assert_same(train(OPTIMIZERS[name], warmed=False), train(OPTIMIZERS[name], warmed=True))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "adamw-amsgrad"])
def test_every_way_to_train_is_the_same_after_a_prewarm(
    name: str, dropout: float, batch_norm: bool, accumulate: int, autocast: torch.dtype | None
) -> None:
    plain, warm = (
        train(
            OPTIMIZERS[name], warmed=warmed, dropout=dropout, batch_norm=batch_norm, accumulate=accumulate,
            autocast=autocast, schedule=accumulate == 1,
        )
        for warmed in (False, True)
    )  # fmt: skip
    assert_same(plain, warm)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "accumulate", "autocast"),
    [("eager", 1, None), ("aot_eager", 2, torch.bfloat16)],
    ids=["eager", "aot-accumulate-bfloat16"],
)
def test_a_compiled_model_trains_the_same_after_a_prewarm(
    backend: str, accumulate: int, autocast: torch.dtype | None
) -> None:
    plain, warm = (
        train(
            OPTIMIZERS["adamw"],
            warmed=warmed,
            backend=backend,
            accumulate=accumulate,
            autocast=autocast,
        )
        for warmed in (False, True)
    )
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
    used = sum(
        p.numel() for name, p in net.named_parameters() if not name.startswith(("frozen", "unused"))
    )
    assert done.state_bytes == used * 4 * 2 + sum(
        s["step"].nbytes for s in optimizer.state.values()
    )
    assert done.copied_bytes == net.hidden.weight.nbytes, "the one that holds -0.0"
    assert done.passes == 2
    assert done.skipped == {}
    assert done.total_s >= done.forward_s + done.backward_s + done.optimizer_s > 0
    assert all(
        float(value.abs().sum()) == 0
        for state in optimizer.state.values()
        for value in state.values()
    )


def test_gradients_that_were_there_are_there_again() -> None:
    net, optimizer, batch = ready()
    net.out.weight.grad = torch.full_like(net.out.weight, -0.0)
    net.unused.weight.grad = torch.ones_like(net.unused.weight)
    held = net.out.weight.grad
    unchanged(net, optimizer, lambda: prewarm(net, optimizer, batch))
    assert net.out.weight.grad is held
    assert net.hidden.weight.grad is None
    verify_prewarm(net, optimizer, batch)
    assert net.out.weight.grad is held


def test_the_batch_is_not_touched_and_may_be_anything_a_model_takes() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            out = self.line(x * 1)
            x.zero_()
            return {"loss": out.sum(), "logits": out}

    net = Writes()
    x = torch.ones(2, 4)
    for batch in ((x, torch.zeros(2)), [x, torch.zeros(2)], {"x": x}, {"x": x, "labels": x}):
        prewarm(net, torch.optim.AdamW(net.parameters()), batch)
        assert bool((x == 1).all())
    needs_gradient = torch.ones(2, 4, requires_grad=True)
    prewarm(
        net, None, {"x": needs_gradient}, loss=lambda model, batch: model(batch["x"] * 1)["loss"]
    )
    assert needs_gradient.grad is None


@pytest.mark.parametrize("form", ["scalar", "pair", "logits", "object"])
def test_the_loss_is_found_in_what_a_model_returns(form: str) -> None:
    seen: list[Any] = []

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
            logits = self.net(inputs)
            seen.append(targets)
            if form == "logits" or targets is None:
                return logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return {"scalar": loss, "pair": (logits, loss), "object": Output(loss)}[form]

    model = Model()
    inputs, targets = batches(1)[0]
    targets = targets.clone()
    targets[0] = -100
    prewarm(model, torch.optim.AdamW(model.parameters()), (inputs, targets))
    assert torch.equal(seen[0], targets)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "second"])
def test_after_an_exception_everything_is_as_it_was(where: str) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("in the middle")

    class Odd(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.note = 1
            raise ZeroDivisionError("in the middle")

    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        calls.append(1)
        if where == "forward" or (where == "second" and len(calls) == 2):
            raise ZeroDivisionError("in the middle")
        return Breaks.apply(value) if where == "backward" else value

    net, optimizer, batch = ready(Odd if where == "optimizer" else OPTIMIZERS["adamw"])
    net.out.weight.grad = torch.ones_like(net.out.weight)

    def action() -> None:
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            prewarm(net, optimizer, batch, loss=loss, steps=2)

    unchanged(net, optimizer, action)
    assert len(optimizer.state) == 0
    assert not hasattr(optimizer, "note")


class IgnoresItsRate(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["n"] = 1
                    p.mul_(0.99)


def test_an_optimizer_that_changes_weights_at_rate_zero_is_refused_and_undone() -> None:
    net, optimizer, batch = ready(IgnoresItsRate)

    def action() -> None:
        with pytest.raises(
            ConfigError,
            match=r"IgnoresItsRate .* changed 'embedding.weight' and 4 more\. Everything",
        ):
            prewarm(net, optimizer, batch)

    unchanged(net, optimizer, action)
    assert len(optimizer.state) == 0


def sparse() -> tuple[Any, ...]:
    net = nn.Sequential(nn.Embedding(VOCABULARY, 4, sparse=True), nn.Linear(4, VOCABULARY))
    return net, torch.optim.SGD(net.parameters(), lr=0.1), batches(1)[0]


def lazy() -> tuple[Any, ...]:
    net = nn.LazyLinear(4)
    return net, None, (torch.ones(2, 4), None)


def steps_in_backward() -> tuple[Any, ...]:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return net, None, (torch.ones(2, 4), None)


def frozen() -> tuple[Any, ...]:
    return nn.Linear(4, 4).requires_grad_(False), None, (torch.ones(2, 4), None)


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "lbfgs": (
        lambda: ready(torch.optim.LBFGS),
        r"LBFGS calls the model as often as it likes.*optimizer=None",
    ),
    "sparse-adam": (lambda: ready(torch.optim.SparseAdam), r"SparseAdam wants sparse gradients"),
    "sparse-gradient": (sparse, r"the gradient of '0.weight' is sparse"),
    "differentiable": (
        lambda: ready(lambda p: torch.optim.Adam(p, differentiable=True)),
        r"differentiable=True",
    ),
    "lazy": (lazy, r"'weight' has no shape yet"),
    "hook": (steps_in_backward, r"'weight' has a hook that runs when its gradient is ready"),
    "frozen": (frozen, r"no parameter requires a gradient"),
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
def test_what_cannot_be_promised_is_refused_with_a_reason(name: str) -> None:
    make, reason = REFUSED[name]
    net, optimizer, batch = make()
    with pytest.raises(ConfigError, match=reason):
        prewarm(net, optimizer, batch)


def test_settings_and_losses_that_do_not_fit_are_refused() -> None:
    net, optimizer, batch = ready()
    with pytest.raises(ConfigError, match="steps=0 must be a whole number from 1 on"):
        prewarm(net, optimizer, batch, steps=0)
    with pytest.raises(ConfigError, match="accumulate=0"):
        prewarm(net, optimizer, batch, accumulate=0)
    with pytest.raises(ConfigError, match="real_steps=0"):
        verify_prewarm(net, optimizer, batch, real_steps=0)
    with pytest.raises(ConfigError, match=r"one element, not a tensor of shape \(3, 5, 23\)"):
        prewarm(net, optimizer, batch, loss=lambda model, batch: model(batch[0]))
    with pytest.raises(ConfigError, match="depends on no parameter"):
        prewarm(net, optimizer, batch, loss=lambda model, batch: torch.zeros(()))
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd-nesterov", "nadam", "adafactor"])
def test_the_proof_holds_and_leaves_nothing_behind(name: str) -> None:
    net, optimizer, batch = ready(OPTIMIZERS[name])
    unchanged(
        net,
        optimizer,
        lambda: verify_prewarm(net, optimizer, batch, accumulate=2, autocast=torch.bfloat16),
    )
    assert len(optimizer.state) == 0


def gradients(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    nn.functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten()).backward()


def rate_zero_with_real_gradients(net: Net, optimizer: Any, batch: Any) -> None:
    states, buffers = torch.get_rng_state(), {name: b.clone() for name, b in net.named_buffers()}
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients(net, batch)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
    for name, b in net.named_buffers():
        b.copy_(buffers[name])
    torch.set_rng_state(states)


def rate_zero_and_negative_zeros(net: Net, optimizer: Any, batch: Any) -> None:
    rate_zero_with_real_gradients(net, optimizer, batch)


def only_the_moments_back_to_zero(net: Net, optimizer: Any, batch: Any) -> None:
    rate_zero_with_real_gradients(net, optimizer, batch)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def forward_alone(net: Net, optimizer: Any, batch: Any) -> None:
    states = torch.get_rng_state()
    net(batch[0])
    torch.set_rng_state(states)


def draws(net: Net, optimizer: Any, batch: Any) -> None:
    torch.rand(1)


def a_real_step(net: Net, optimizer: Any, batch: Any) -> None:
    gradients(net, batch)
    optimizer.step()
    optimizer.zero_grad()


def a_rate(net: Net, optimizer: Any, batch: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize(
    ("naive", "named"),
    [
        (rate_zero_with_real_gradients, r"'embedding.weight'.* differs after 2 real step"),
        (rate_zero_and_negative_zeros, r"parameter 'hidden.weight' changed"),
        (only_the_moments_back_to_zero, r"'embedding.weight'.* differs after 2 real step"),
        (forward_alone, r"buffer 'seen' changed"),
        (draws, r"state of the random numbers of torch changed"),
        (a_real_step, r"parameter 'embedding.weight' changed"),
        (gradients, r"gradient of 'embedding.weight' changed"),
        (a_rate, r"'lr' of group 0 of AdamW changed"),
    ],
)
def test_a_careless_prewarm_is_caught_by_the_proof(naive: Callable[..., None], named: str) -> None:
    net, optimizer, batch = ready()
    if naive is not rate_zero_and_negative_zeros:
        nn.init.ones_(net.hidden.weight)

    def action() -> None:
        warm = (
            (lambda: naive(net, batch))
            if naive is gradients
            else (lambda: naive(net, optimizer, batch))
        )
        with pytest.raises(ConfigError, match=named):
            verify_prewarm(net, optimizer, batch, warm=warm, real_steps=2)

    unchanged(net, optimizer, action)
    assert len(optimizer.state) == 0
