"""Remember what a training step changes besides weights, and put it back.

In:    a model, and whatever else has attributes that a step may change.
Out:   context managers; when one ends, also by an exception, everything is what and where it was.
Where: the trainer's thread, between two steps.
State: copies of buffers, of plain tensors that modules hold, and of gradients that were there already.
Cost:  those copies. No weight is copied unless it is named.

Objects are put back as well as contents: an attribute is the same tensor afterwards, with the same bits.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.train.prewarm_bits import alike, copy_of, memory, opaque, same, write

cuda: Any = torch.cuda  # partly without types
xpu: Any = torch.xpu

Undo = Callable[[], Any]

OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has; its tensors and children are looked after by name."""
NOT_THE_USERS = frozenset({"torch", "builtins", "abc", "typing"})


@contextmanager
def kept(
    model: nn.Module, parameters: Iterable[nn.Parameter], copied: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Put back buffers, gradients, modes, random numbers and attributes of modules, and the tensors `copied`."""
    parameters = list(parameters)
    with ExitStack() as stack:
        # The last to go: what runs on the way out may draw random numbers.
        stack.callback(set_random_states, random_states())
        stack.callback(tracker_kept())
        stack.callback(
            torch.clear_autocast_cache
        )  # casts of weights, of an autocast that is still open outside
        for tensor in copied:
            stack.callback(content_kept(tensor, "a parameter"))
        for name, buffer in model.named_buffers():
            stack.callback(content_kept(buffer, f"buffer {name!r}"))
        weights = {place(parameter) for parameter in parameters} - {None}
        for name, module in model.named_modules():
            stack.callback(module_kept(name, module, weights))
        for parameter in parameters:
            stack.callback(gradient_kept(parameter))
        yield


def random_states() -> dict[str, Any]:
    """Of every generator that is there without being asked for. Sharded tensors draw from the device's."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # fmt: skip
    if cuda.is_initialized():
        states["cuda"] = cuda.get_rng_state_all()
    if xpu.is_available() and xpu.is_initialized():
        states["xpu"] = xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        cuda.set_rng_state_all(states["cuda"])
    if "xpu" in states:
        xpu.set_rng_state_all(states["xpu"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def tracker_kept() -> Undo:
    """The object by which DTensor draws. When it is made it may take over the state of rank 0, so if it was not there
    it must not be there afterwards: the first real step would draw without having done so."""
    place: Any = sys.modules.get("torch.distributed.tensor._random")
    tracker: Any = getattr(place, "_rng_tracker", None)
    states = {name: state.clone() for name, state in getattr(tracker, "rng_states", {}).items()}

    def undo() -> None:
        now: Any = sys.modules.get("torch.distributed.tensor._random")
        if now is not None:
            now._rng_tracker = tracker
        if states:
            tracker.rng_states = states

    return undo


def content_kept(tensor: Tensor, what: str) -> Undo:
    """The bits of a tensor; and its memory, should it be given another. `what` it is, for errors."""
    if opaque(tensor):
        raise ConfigError(
            f"prewarm: {what} is a {type(tensor).__name__} whose memory cannot be seen, so it cannot be promised that a pass "
            "leaves it as it was. Keep it outside the model, or train without prewarm."
        )
    if tensor.is_mkldnn:  # its memory can be copied but not looked at
        return partial(mkldnn_restored, tensor, tensor.detach().clone())
    before, saved = tensor.detach(), copy_of(tensor)

    def undo() -> None:
        now = memory(tensor)
        if not saved or same(now, saved):
            return
        with suppress(RuntimeError, ValueError):  # whether it worked is seen below
            if tensor.is_quantized or [piece.shape for piece in now] != [
                piece.shape for piece in saved
            ]:
                tensor.data = before  # the old memory, and by what it is divided
            write(tensor, saved)
        if not same(memory(tensor), saved):
            raise ConfigError(
                f"prewarm: a pass changes {what} in a way that cannot be undone. Make the model again, and train it without "
                "prewarm."
            )

    return undo


def mkldnn_restored(tensor: Tensor, saved: Tensor) -> None:
    if not alike(tensor, saved):
        tensor.detach().copy_(saved)


def gradient_kept(parameter: nn.Parameter) -> Undo:
    """Gives a gradient back that was there. Its bits are copied: the next backward pass writes to the buckets of DDP,
    and it may be part of one."""
    grad = parameter.grad
    restore = None if grad is None else content_kept(grad, "a gradient")

    def undo() -> None:
        parameter.grad = grad
        if restore is not None:
            restore()

    return undo


def module_kept(name: str, module: nn.Module, weights: set[int | None]) -> Undo:
    """A module's mode, its own tables of parameters, buffers and children, and what a user's class keeps besides,
    unless it lies in the memory of `weights`."""
    training = module.training
    tables = [table_kept(table) for table in (module._parameters, module._buffers, module._modules)]
    frozen = [(p, p.requires_grad) for p in module._parameters.values() if p is not None]
    undo_names, undo_extra = None, extra_state_kept(name, module)
    # A wrapper of torch's (DDP, a compiled module) is to stay warm; its layers keep all in parameters and buffers.
    if is_users(module):
        undo_names = names_kept(vars(module), f"module {name or 'model'!r}", OF_TORCH, weights)

    def undo() -> None:
        for restore in tables:
            restore()
        if module.training != training:
            module.training = training
        for parameter, requires_grad in frozen:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        if undo_names is not None:
            undo_names()
        undo_extra()

    return undo


def place(tensor: Tensor) -> int | None:
    """Where the memory of a tensor begins, if it is in one place."""
    inner = getattr(
        tensor, "_local_tensor", None
    )  # not by to_local(): this is done for every module
    plain = tensor.detach() if inner is None else inner
    if plain.layout is not torch.strided or hasattr(plain, "__tensor_flatten__") or opaque(plain):
        return None
    return plain.untyped_storage().data_ptr()


def is_users(module: nn.Module) -> bool:
    """Whether a user wrote its class; `fully_shard` puts one of torch's in front of it."""
    return any(
        kind.__module__.partition(".")[0] not in NOT_THE_USERS for kind in type(module).__mro__
    )


def extra_state_kept(name: str, module: nn.Module) -> Undo:
    """What a module says of itself beyond tensors. It knows itself how to take that back."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return lambda: None
    before = copy.deepcopy(module.get_extra_state())

    def undo() -> None:
        if alike(before, module.get_extra_state()):
            return
        module.set_extra_state(copy.deepcopy(before))
        if not alike(before, module.get_extra_state()):
            raise ConfigError(
                f"prewarm: a pass changes the extra state of module {name or 'model'!r} ({type(module).__name__}), and "
                "set_extra_state() does not bring the old one back. Make it do so, or train without prewarm."
            )

    return undo


def names_kept(
    namespace: dict[str, Any],
    owner: str,
    skip: frozenset[str] = frozenset(),
    weights: set[int | None] | None = None,
) -> Undo:
    """The values of attributes: the objects, and the contents of those whose kind is known to change in place."""
    saved = {name: value for name, value in namespace.items() if name not in skip}
    contents = [
        undo
        for name, value in saved.items()
        if (undo := value_kept(value, f"attribute {name!r} of {owner}", weights or set()))
        is not None
    ]

    def undo_all() -> None:
        for name in [name for name in namespace if name not in saved and name not in skip]:
            del namespace[name]
        for name, value in saved.items():
            if name not in namespace or namespace[name] is not value:
                namespace[name] = value
        for undo in contents:
            undo()

    return undo_all


def value_kept(value: Any, what: str, weights: set[int | None]) -> Undo | None:
    """How to bring back what a value holds, or None for what does not change in place or is looked after elsewhere."""
    if isinstance(value, Tensor):
        ours = isinstance(value, nn.Parameter) or value.is_meta or value.grad_fn is not None
        return None if ours or place(value) in weights else content_kept(value, what)
    if isinstance(value, np.ndarray):
        return array_kept(value) if value.flags.writeable else None
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        source: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        return partial(setattr, source, "state", source.state)
    if isinstance(value, random.SystemRandom):
        return None  # nothing that could be put back
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, list | deque):
        return sequence_kept(value)
    if isinstance(value, dict):
        return table_kept(value)
    if isinstance(value, set):
        return set_kept(value)
    return None


def array_kept(value: np.ndarray[Any, Any]) -> Undo:
    saved = value.copy()

    def undo() -> None:
        if not value.flags.writeable:
            value.flags.writeable = True  # as it was
        if not alike(value, saved):
            value[...] = saved

    return undo


def sequence_kept(value: list[Any] | deque[Any]) -> Undo:
    saved = list(value)

    def undo() -> None:
        if len(value) != len(saved) or any(a is not b for a, b in zip(value, saved, strict=True)):
            value.clear()
            value.extend(saved)

    return undo


def set_kept(value: set[Any]) -> Undo:
    saved = set(value)

    def undo() -> None:
        if value != saved:
            value.clear()
            value.update(saved)

    return undo


def table_kept(value: dict[Any, Any]) -> Undo:
    saved = dict(value)

    def undo() -> None:
        if value.keys() != saved.keys() or any(value[key] is not saved[key] for key in saved):
            value.clear()
            value.update(saved)

    return undo
