"""Tensors as the bits they are made of.

In:    tensors, whole or sharded (of a DTensor, this rank's part), of any layout.
Out:   whether two are the same to the last bit; copies, and the way back; checksums.
Where: the trainer's thread.
State: none.

Comparing numbers is not enough: NaN differs from itself, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For each size of an element, an integer of that size."""

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""What tensors of these layouts are made of."""

PIECE = 1 << 16
"""Elements that a checksum takes at once on a CPU: the products stay in its cache."""
LARGE_PIECE = 1 << 22
"""On accelerators, where each piece costs two launches. The products need 32 MiB, and so do the factors."""


def local(tensor: Tensor) -> Tensor:
    """The memory of a tensor that is on this rank."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def memory(tensor: Tensor) -> list[Tensor]:
    """The same memory, seen as integers: of most tensors one piece, of others all that they are made of.

    None of a tensor that has no memory now. A TypeError says that it cannot be seen.
    """
    plain = local(tensor)
    # The kind comes first: to ask a quantized tensor for a view, or a sparse one for its storage, is fatal.
    if hasattr(plain, "__tensor_flatten__"):
        parts = [getattr(plain, name) for name in plain.__tensor_flatten__()[0]]
    elif plain.layout is torch.sparse_coo:
        parts = [plain._indices(), plain._values()]
    elif plain.layout in COMPRESSED:
        parts = [getattr(plain, name)() for name in COMPRESSED[plain.layout]]
    elif plain.is_mkldnn:
        parts = [plain.to_dense()]  # a copy
    elif plain.is_nested:
        parts = list(plain.unbind())
    elif plain.is_quantized:
        whole = torch.empty(0, dtype=torch.uint8, device=plain.device)
        parts = [whole.set_(plain.untyped_storage()), *quantizer(plain)]
    else:
        return integers(plain)
    return [piece for part in parts for piece in memory(part)]


def integers(plain: Tensor) -> list[Tensor]:
    try:
        storage = plain.untyped_storage()
        storage.data_ptr()
    except (NotImplementedError, RuntimeError) as error:
        raise TypeError(
            f"the memory of a {type(plain).__name__} cannot be seen: {error}"
        ) from error
    if storage.device.type == "meta" or (plain.numel() > 0 and storage.nbytes() == 0):
        return []
    if plain.is_conj() or plain.is_neg() or plain.is_inference():
        # What lies in memory, not what it stands for; and memory that may be written to here.
        twin = torch.empty(0, dtype=plain.dtype, device=plain.device)
        plain = twin.set_(storage, plain.storage_offset(), plain.shape, plain.stride())
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return [plain.view(INTEGERS[plain.element_size()])]


def quantizer(plain: Tensor) -> list[Tensor]:
    """By what a quantized tensor was divided and shifted. Copies."""
    if plain.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([plain.q_scale(), plain.q_zero_point()], dtype=torch.float64)]
    return [plain.q_per_channel_scales(), plain.q_per_channel_zero_points()]


def opaque(tensor: Tensor) -> bool:
    """Whether nothing can be said of the memory of a tensor."""
    try:
        memory(tensor)
    except TypeError:
        return True
    return False


def copy_of(tensor: Tensor) -> list[Tensor]:
    """A copy of the bits, to be put back by `write`."""
    return [piece.clone() for piece in memory(tensor)]


def same(pieces: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(pieces) == len(others) and all(map(torch.equal, pieces, others))


def write(tensor: Tensor, saved: Sequence[Tensor]) -> bool:
    """Put the bits of `copy_of` back. Returns whether they had changed; what has not is not touched."""
    pieces = memory(tensor)
    if same(pieces, saved):
        return False
    for piece, old in zip(pieces, saved, strict=True):
        for dim, stride in enumerate(piece.stride()):
            if (
                stride == 0 and piece.shape[dim] > 1
            ):  # the same memory over and over; torch writes to none such
                piece, old = piece.narrow(dim, 0, 1), old.narrow(dim, 0, 1)
        piece.copy_(old)
    return True


def checksum(tensor: Tensor, drawn: dict[torch.device, Tensor] | None = None) -> Hashable:
    """A number in which each bit and its place count, and the shapes: one pass, and memory for a piece at a time.

    Each integer is multiplied by an odd number that is drawn for its place, and all are added up. A change of one always
    shows; others are missed as rarely as 64 bits allow. It is computed on the device, and waited for once.
    `drawn` keeps those numbers from one tensor to the next.
    """
    drawn = {} if drawn is None else drawn
    return tuple(
        (tuple(piece.shape), piece.stride(), summed(piece, drawn)) for piece in memory(tensor)
    )


def summed(piece: Tensor, drawn: dict[torch.device, Tensor]) -> int:
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(piece.shape, piece.stride(), strict=True)
    )
    # In the order of memory, where it has no gaps; a part of another tensor is copied.
    flat = piece.as_strided((span,), (1,)) if span == piece.numel() else piece.flatten()
    if flat.element_size() == 8:
        # Two sign bits of 64 would cancel each other out, whatever they are multiplied by.
        flat = flat.view(torch.int32)
    if flat.device not in drawn:
        drawn[flat.device] = odd_numbers(
            PIECE if flat.device.type == "cpu" else LARGE_PIECE, flat.device
        )
    factors = drawn[flat.device]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), len(factors)):
        part = flat[begin : begin + len(factors)]
        total = (
            total * 6364136223846793005 + (part * factors[: len(part)]).sum()
        )  # odd, so that no bit is lost
    return int(total)


def odd_numbers(length: int, device: torch.device) -> Tensor:
    """Always the same ones, and not from a generator that training uses."""
    generator = torch.Generator(device).manual_seed(1)
    drawn = torch.empty(length, dtype=torch.int64, device=device).random_(
        -(1 << 62), 1 << 62, generator=generator
    )
    return drawn.mul_(2).add_(1)


def sensitive(tensor: Tensor) -> bool:
    """Whether adding zero may change bits: -0.0 may become 0.0, a NaN another one, and so may what is so small that the
    processor was told to take it for zero (`torch.set_flush_denormal`)."""
    plain = local(tensor)
    pieces = memory(plain)
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    if len(pieces) != 1 or plain.layout is not torch.strided:
        return len(pieces) > 0  # nobody knows what adding does to these
    return bool(((plain == 0) & (pieces[0] != 0)).any()) or bool(torch.isnan(plain).any())


def nbytes(tensor: Tensor) -> int:
    """Memory of a tensor on this rank."""
    return sum(piece.numel() * piece.element_size() for piece in memory(tensor))


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same: tensors and arrays bit by bit, containers item by item."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return form(one) == form(other) and same(memory(one), memory(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            alike(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def form(tensor: Tensor) -> Hashable:
    shape = None if tensor.is_nested else tensor.shape  # that of a nested one shows in its parts
    return shape, tensor.dtype, tensor.device, tensor.layout, tensor.is_conj(), tensor.is_neg()
