"""Tensors as the bits they are made of.

In:    tensors, whole or sharded (of a DTensor, this rank's part).
Out:   whether two are the same to the last bit; copies, and the way back.
Where: the trainer's thread.
State: none.

Comparing numbers is not enough: NaN differs from itself, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For each size of an element, an integer of that size."""


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor that is on this rank."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def bits(tensor: Tensor) -> Tensor:
    """The same memory, seen as integers. What is sparse is made dense, and so is a copy."""
    plain = local(tensor)
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.view(INTEGERS[plain.element_size()])


def copy_of(tensor: Tensor) -> Tensor:
    """A copy of the bits, to be put back by `write`."""
    return bits(tensor).clone()


def write(tensor: Tensor, saved: Tensor) -> bool:
    """Put the bits of `copy_of` back. Returns whether they had changed; what has not is not touched."""
    if tensor.is_meta or torch.equal(bits(tensor), saved):
        return False
    bits(tensor).copy_(saved)
    return True


def checksum(tensor: Tensor) -> int:
    """The sum of the bits as integers: one pass and no memory. What changes by accident changes it."""
    return 0 if tensor.is_meta else int(bits(tensor).sum())


def sensitive(tensor: Tensor) -> bool:
    """Whether adding zero may change bits: -0.0 may become 0.0, and a NaN another one."""
    if tensor.is_meta:
        return False
    plain = local(tensor)
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    negative_zero = (plain == 0) & torch.signbit(plain)
    return bool(negative_zero.any()) or bool(torch.isnan(plain).any())


def nbytes(tensor: Tensor) -> int:
    """Memory of a tensor on this rank."""
    plain = local(tensor)
    return plain.numel() * plain.element_size()


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same: tensors and arrays bit by bit, containers item by item."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        form = (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)
        return form and (one.is_meta or torch.equal(bits(one), bits(other)))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
