"""A small GPT: the decoder of today's open models, in one file.

In:    ids (batch, seq_len); where documents must not see each other, also a batch's `positions` and `cu_seqlens`.
Out:   logits (batch, seq_len, vocab_size) in float32, and from `loss` a sum and a count.
Where: the trainer's thread, on whatever device the model is.
State: the parameters. The tables of the rotary embedding are derived from the shape, and not saved.
Cost:  attention within documents makes one mask of batch · seq_len² bytes a forward.

Pre-norm, RMSNorm, rotary embeddings, normalised queries and keys, SwiGLU, tied embeddings, no biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.types import IGNORE

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    """How large a model is."""

    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads) < 1 or self.width % (2 * self.heads):
            raise ConfigError(
                f"{self}: all must be positive, and width an even multiple of heads, to rotate in pairs"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Of the MLP: three matrices of 8/3 of the width have as many parameters as the usual two of 4 times it."""
        return round_up(8 * self.width // 3, 64)


SIZES: dict[str, Shape] = {
    "toy": Shape(4, 96, 3),  # 0.44 M parameters without the embedding: for two CPU cores
    "mini": Shape(4, 256, 4),  # 3.2 M
    "small": Shape(8, 512, 8),  # 26 M
    "medium": Shape(12, 640, 10),  # 59 M
    "125m": Shape(12, 768, 12),  # 85 M, and 39 M of the embedding with GPT-2's vocabulary
}


class RMSNorm(nn.Module):
    """Scales a vector to a root mean square of 1. In float32, for squares of bfloat16 lose too much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), eps=1e-6).type_as(x)


class Attention(nn.Module):
    """Every token looks at those before it, in its own document where there is a mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        # Normalised queries and keys bound the logits of the softmax, so that high learning rates stay stable.
        self.q_norm = RMSNorm(shape.head_width)
        self.k_norm = RMSNorm(shape.head_width)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, seq_len, width = x.shape
        qkv = self.qkv(x).view(batch, seq_len, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq_len, head_width)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        # The mask is right everywhere, and spends work on what it hides. For long sequences on GPUs use a kernel that
        # skips it: flash attention's varlen function, which takes cu_seqlens as it is, or `flex_attention` with a block
        # mask of the same document numbers. This file has been run with neither.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        added: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq_len, width))
        return added


class MLP(nn.Module):
    """SwiGLU: it learns more than GELU with as many parameters (arXiv 2002.05202), and most open models have it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return added


class Block(nn.Module):
    """One layer, and the unit in which the model is compiled and sharded."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """A language model. The same seed gives the same weights wherever it is built on the CPU, whatever the ranks."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, vocab_size: int, seq_len: int, dropout: float = 0.0) -> None:
        super().__init__()
        if vocab_size < 1 or seq_len < 1:
            raise ConfigError(
                f"GPT: vocab_size is {vocab_size} and seq_len {seq_len}; both must be positive"
            )
        self.shape, self.vocab_size, self.seq_len = shape, vocab_size, seq_len
        # Matrix multiplication likes multiples of 64. No logit leaves for the rows that are added, and they never learn.
        self.embedding = nn.Embedding(round_up(vocab_size, 64), shape.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)

        frequencies = ROTARY_BASE ** -(torch.arange(0, shape.head_width, 2) / shape.head_width)
        angles = torch.outer(torch.arange(seq_len), frequencies)  # (seq_len, head_width / 2)
        # FSDP's mixed precision casts what a block is given; cast_forward_inputs=False leaves these in float32.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    @classmethod
    def from_size(cls, name: str, vocab_size: int, seq_len: int, dropout: float = 0.0) -> GPT:
        """A model of one of `SIZES`."""
        if name not in SIZES:
            raise ConfigError(f"there is no model size {name!r}: choose one of {', '.join(SIZES)}")
        return cls(SIZES[name], vocab_size, seq_len, dropout)

    def _initialise(self) -> None:
        # Each block adds two terms to the residual stream: as in GPT-2, scaled so that their sum does not grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(
                    parameter, std=INIT_STD / math.sqrt(2 * self.shape.layers) if adds else INIT_STD
                )

    def forward(
        self, inputs: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits for the token after each.

        positions, cu_seqlens: a batch's own; with them no document sees another. Both or neither.
        """
        batch, seq_len = inputs.shape
        if seq_len > self.seq_len:
            raise ConfigError(
                f"GPT: rows of {seq_len} ids, and the model was built for seq_len={self.seq_len}"
            )
        if (positions is None) != (cu_seqlens is None):
            missing = "positions" if positions is None else "cu_seqlens"
            raise ConfigError(
                f"GPT: attention within documents needs positions and cu_seqlens, and {missing} is None"
            )
        # Once for all blocks. And outside of them: the length of cu_seqlens changes with every batch, and a compiled
        # block should see but one shape.
        mask = None if cu_seqlens is None else document_mask(cu_seqlens, batch, seq_len)
        if positions is None:
            positions = torch.arange(seq_len, device=inputs.device).unsqueeze(0)
        cos = self.cos[positions].unsqueeze(
            1
        )  # (batch or 1, 1 for all heads, seq_len, head_width / 2)
        sin = self.sin[positions].unsqueeze(1)

        x = self.dropout(self.embedding(inputs))
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)[..., : self.vocab_size]
        # The loss wants float32 anyway; and always a copy, for FSDP hangs its hooks on what leaves, which must be no view.
        return logits.to(torch.float32, copy=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by its position's angles, so that a product tells how far apart two tokens are."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def document_mask(cu_seqlens: Tensor, batch: int, seq_len: int) -> Tensor:
    """(batch, 1, seq_len, seq_len): True where a token may look, which is back, in its own document."""
    places = torch.arange(batch * seq_len, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(places, cu_seqlens, right=True).view(batch, 1, seq_len)
    return (document.unsqueeze(-1) == document.unsqueeze(-2)).tril()


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropy, in float32, over the targets that count, and their number.

    A sum, since ranks and micro-steps may have different numbers of targets: add both up, then divide.
    """
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (targets != IGNORE).sum()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """For an optimizer: the matrices of the blocks decay; norms and the embedding do not.

    A norm's scale has its rest at 1 and not at 0, and a rare token's row would shrink through all the steps it is not in.
    """
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decay if parameter.ndim == 2 and not name.endswith("embedding.weight") else keep).append(
            parameter
        )
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


def count_parameters(model: nn.Module) -> int:
    """All of them, each once; where they are sharded, those of all ranks."""
    return sum(parameter.numel() for parameter in model.parameters())


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
