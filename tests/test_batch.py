"""A batch: the keys and conventions of transformers, the pair of nanoGPT, document masks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock import AsyncDataLoader, Batch, TextDataset

SEQ_LEN = 96


def first(corpus: Path, **about: Any) -> Batch:
    about = {"tokenizer": "byte", "seq_len": SEQ_LEN} | about
    with AsyncDataLoader(TextDataset(corpus / "docs.jsonl", **about), 4, n_workers=1) as loader:
        return next(loader)


# The mapping


def test_a_batch_is_a_mapping_of_the_usual_names(corpus: Path) -> None:
    batch = first(corpus)
    assert [*batch] == [*batch.keys()] == ["input_ids", "labels"]
    assert torch.equal(batch["input_ids"], batch.inputs)
    assert {**batch}.keys() == {"input_ids", "labels"}
    assert "attention_mask" not in batch
    assert batch.get("attention_mask") is None
    with pytest.raises(KeyError, match="this batch has input_ids, labels"):
        batch["tokens"]
    assert repr(batch) == "Batch(index=0, epoch=0, shape=(4, 96), keys=['input_ids', 'labels'])"
    assert batch == batch != first(corpus)


def test_labels_are_not_shifted_and_targets_are(corpus: Path) -> None:
    batch = first(corpus)
    labels = batch["labels"]
    assert torch.equal(labels[:, 1:], batch["input_ids"][:, 1:])
    assert torch.equal(labels[:, 1:], batch.targets[:, :-1])
    assert (labels[:, 0] == -100).all()
    labels[0, 5] = -100  # a change stays
    assert batch["labels"][0, 5] == -100
    assert batch.inputs[0, 5] != -100


def test_labels_are_ignored_where_a_row_is_padded(corpus: Path) -> None:
    data = TextDataset(corpus / "docs.jsonl", tokenizer="byte", seq_len=512, packing="best_fit")
    with AsyncDataLoader(data, 4, n_workers=1, epochs=1, drop_last=False) as loader:
        *_, batch = loader
    ignored = batch["labels"] == -100
    assert ignored[:, 1:].any()
    assert torch.equal(ignored[:, 1:], batch.targets[:, :-1] == -100)
    assert torch.equal(batch["labels"][~ignored], batch.inputs[~ignored])


def test_a_batch_moves_to_a_device_with_its_place_in_the_stream(corpus: Path) -> None:
    batch = first(corpus, positions=True)
    moved = batch.to("meta", non_blocking=True)
    tensors = {name: value for name, value in moved.items() if name != "max_seqlen"}
    assert {value.device.type for value in tensors.values()} == {"meta"}
    assert {name: value.shape for name, value in tensors.items()} == {
        name: batch[name].shape for name in tensors
    }
    assert moved.state_dict() == batch.state_dict()
    assert batch.inputs.device.type == "cpu"


@pytest.mark.parametrize(
    ("sample", "keys"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2], "weight": 0.5}, ["input_ids", "labels", "weight"]),
        (np.arange(5), ["input_ids", "labels"]),  # a row of ids
        ((np.zeros(3), 1), ["inputs", "targets"]),  # whose convention is not known
        (np.zeros((2, 2)), ["inputs"]),
        ((1, 2, 3), ["data"]),
    ],
)
def test_samples_have_their_own_fields(sample: Any, keys: list[str]) -> None:
    with AsyncDataLoader([sample] * 4, 2) as loader:
        batch = next(loader)
    assert [*batch] == keys
    assert {len(batch[key]) for key in keys} == {3 if keys == ["data"] else 2}
    if isinstance(sample, np.ndarray) and sample.ndim == 1:
        assert batch["labels"].tolist() == [[-100, 1, 2, 3]] * 2
        assert batch.targets.tolist() == [[1, 2, 3, 4]] * 2


# Document masks


@pytest.fixture
def packed(corpus: Path) -> Batch:
    return first(corpus, positions=True, packing="best_fit", seq_len=512)


def test_document_ids_and_lengths_agree_with_the_positions(packed: Batch) -> None:
    names = ["input_ids", "labels", "position_ids", "document_ids", "cu_seqlens", "max_seqlen"]
    assert [*packed] == names
    positions, documents = packed["position_ids"], packed["document_ids"]
    assert documents.shape == positions.shape
    assert (documents[:, 0] == 0).all()
    assert documents.max() > 0
    assert torch.equal(documents.diff(dim=1) == 1, positions[:, 1:] == 0)
    bounds = packed["cu_seqlens"].tolist()
    assert bounds == [*torch.where(positions.flatten() == 0)[0].tolist(), positions.numel()]
    assert packed["max_seqlen"] == max(np.diff(bounds)) == positions.max() + 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_packed_documents_do_not_attend_to_each_other(packed: Batch) -> None:
    """With flex attention and with the arguments of varlen kernels, on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, length = packed.inputs.shape
    documents = packed.document_ids

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    mask = create_block_mask(same_document, rows, None, length, length, device="cpu")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, rows, 2, length, 8)
    together = flex_attention(q, k, v, block_mask=mask)

    # Of the flattened rows, as flash_attn_varlen_func takes them.
    bounds = packed.cu_seqlens.tolist()
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    apart = []
    for begin, end in pairwise(bounds):
        assert end - begin <= packed.max_seqlen
        part = [x[begin:end].transpose(0, 1)[None] for x in flat]
        apart.append(scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1))
    assert torch.allclose(together.transpose(1, 2).flatten(0, 1), torch.cat(apart), atol=1e-5)
