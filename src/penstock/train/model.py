"""A small GPT in one file: the decoder of current open models.

Pre-norm, RMSNorm, rotary embeddings, normalised queries and keys, SwiGLU, tied embeddings, no biases.
Attention within documents needs a mask of batch × seq_len² bytes in each forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.types import IGNORE

INIT_STD = 0.02
NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    """The size of a model. `width` is a multiple of 2 × heads."""

    layers: int
    width: int
    heads: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Width of the MLP: three matrices of factor 8/3 have as many parameters as two of 4."""
        return round_up(8 * self.width // 3, 64)


SIZES: dict[str, Shape] = {
    "toy": Shape(4, 96, 3),  # 0.44 M parameters without the embedding: for two CPU cores
    "mini": Shape(4, 256, 4),  # 3.2 M
    "small": Shape(8, 512, 8),  # 26 M
    "medium": Shape(12, 640, 10),  # 59 M
    "125m": Shape(12, 768, 12),  # 85 M, and 39 M of the embedding with GPT-2's vocabulary
}


class Attention(nn.Module):
    """Causal attention, within documents if there is a mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        # Normalised queries and keys keep the softmax stable at high learning rates.
        self.q_norm = nn.RMSNorm(shape.head_width, NORM_EPS)
        self.k_norm = nn.RMSNorm(shape.head_width, NORM_EPS)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, seq_len, width = x.shape
        qkv = self.qkv(x).view(batch, seq_len, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq_len, head_width)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        # With a mask, hidden scores are computed too. For long sequences on GPUs, use a varlen
        # kernel with cu_seqlens, or flex attention with a block mask of the documents.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq_len, width))
        return out


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: the unit of compilation and sharding."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, NORM_EPS)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """A language model. The same seed gives the same weights, for any number of ranks."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, vocab_size: int, seq_len: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, vocab_size
        # Matrix products are faster for multiples of 64. The added rows have no logits and no
        # gradient.
        self.embedding = nn.Embedding(round_up(vocab_size, 64), shape.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, NORM_EPS)

        frequencies = ROTARY_BASE ** -(torch.arange(0, shape.head_width, 2) / shape.head_width)
        angles = torch.outer(torch.arange(seq_len), frequencies)  # (seq_len, head_width / 2)
        # FSDP2 must not cast these to bfloat16: see cast_forward_inputs=False.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    @classmethod
    def from_size(cls, name: str, vocab_size: int, seq_len: int, dropout: float = 0.0) -> GPT:
        """Return a model of one of `SIZES`."""
        return cls(SIZES[name], vocab_size, seq_len, dropout)

    def _initialise(self) -> None:
        # As in GPT-2, the two residual terms of each block are scaled, so that the sum does not
        # grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                scale = math.sqrt(2 * self.shape.layers) if adds else 1.0
                nn.init.normal_(parameter, std=INIT_STD / scale)

    def forward(
        self, inputs: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the next token, in float32.

        positions, cu_seqlens: those of a batch. With both, documents do not attend to each other.
        """
        batch, seq_len = inputs.shape
        # Outside the blocks, because the length of cu_seqlens changes with every batch, and a
        # compiled block should see only one shape.
        mask = None if cu_seqlens is None else document_mask(cu_seqlens, batch, seq_len)
        if positions is None:
            positions = torch.arange(seq_len, device=inputs.device).unsqueeze(0)
        # (batch or 1, 1 for all heads, seq_len, head_width / 2)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

        x = self.dropout(self.embedding(inputs))
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)[..., : self.vocab_size]
        # A copy, because FSDP2 registers hooks on the output, which must not be a view.
        return logits.to(torch.float32, copy=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of features by the angles of its position."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def document_mask(cu_seqlens: Tensor, batch: int, seq_len: int) -> Tensor:
    """Return (batch, 1, seq_len, seq_len): True where a token may attend."""
    places = torch.arange(batch * seq_len, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(places, cu_seqlens, right=True).view(batch, 1, seq_len)
    return (document.unsqueeze(-1) == document.unsqueeze(-2)).tril()


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of the targets, and their number.

    Not the mean, because ranks and micro-steps may have different numbers of targets.
    """
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total, (targets != IGNORE).sum()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups: only the matrices of blocks have weight decay."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        decays = parameter.ndim == 2 and not name.endswith("embedding.weight")
        groups[0 if decays else 1]["params"].append(parameter)
    return groups


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of all ranks."""
    return sum(parameter.numel() for parameter in model.parameters())


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple
