"""The data of a run: which text, what is kept for evaluation, and the loaders of both.

In:    options and settings.
Out:   what a loader is made of, and the loaders. No torch before a step needs ids that are made up.
Where: making a loader lists files and loads a vocabulary, so it happens on a thread of its own; see `feed.fallback`.
State: none.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.config import current_shard
from penstock.errors import ConfigError
from penstock.settings import Settings
from penstock.tools.data_choice import LOCAL, text_path
from penstock.train.options import BATCH, TrainOptions

if TYPE_CHECKING:
    from penstock.dataset_config import DatasetConfig
    from penstock.encode.batch import Batch
    from penstock.loader import AsyncDataLoader
    from penstock.watch.telemetry import Telemetry

SYNTHETIC_VOCABULARY = 8192
"""Ids of `--dataset synthetic`."""
ENDLESS = 1 << 40
"""Rows of a stand-in for data: more than any run takes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to read."""

    title: str
    """What it is called on the console."""
    prefix: str
    """What the loader's events begin with."""
    seq_len: int
    vocabulary: Callable[[], int]
    """How many ids there are. May take a while, and may need a server."""
    dataset: Callable[[str | None], Any]
    """The data of a split: "train", "val" or None for all of it."""


def recipe(options: TrainOptions, resolved: Settings) -> Recipe:
    """What the options ask for."""
    if options.dataset is None:
        return _from_table(options, resolved)
    if options.dataset == "synthetic":
        return _synthetic(options)
    name, (title, prefix) = options.dataset, _called(options.dataset)
    shared = _Once(lambda: _tokenizer(options.tokenizer))

    def dataset(split: str | None) -> Any:
        from penstock.dataset import TextDataset

        chosen: Any = split
        packing: Any = options.packing
        tokenizer = shared()  # first: making a vocabulary may make the text too
        return TextDataset(
            text_path(name, options.local_path), tokenizer=tokenizer, seq_len=options.seq_len, text_field=options.text_field, packing=packing,
            split=chosen, val_fraction=options.val_fraction, positions=options.doc_mask, remote={"config": options.dataset_config},
            **resolved.text_arguments(),
        )  # fmt: skip

    return Recipe(
        title=title,
        prefix=prefix,
        seq_len=options.seq_len,
        vocabulary=lambda: int(shared().vocab_size),
        dataset=dataset,
    )


def _called(urls: Any) -> tuple[str, str]:
    """What data is called on the console, and what its loader's events begin with: FineWeb-Edu has names of its own."""
    from penstock.read.hub import SHORT_NAMES

    address = re.escape(SHORT_NAMES["fineweb_edu"])
    for url in map(str, [urls] if isinstance(urls, str | os.PathLike) else urls or ()):
        # As everywhere, a file goes before a short name that it is called by.
        short = url == LOCAL or (url == "fineweb_edu" and not os.path.exists(url))
        if short or re.match(rf"{address}([/@]|$)", url):
            return "FineWeb-Edu", "fineweb_loader_"
    return "", "loader_"


def _tokenizer(name: str) -> Any:
    from penstock.encode.tokenizer import load_tokenizer

    if name == "stdlib":
        from penstock.train.train_bpe import write_vocabulary

        return load_tokenizer(write_vocabulary())
    return load_tokenizer(name)


def _tokenizer_of(parameters: Mapping[str, Any]) -> Any:
    """The tokenizer that a table of text names."""
    from penstock.encode.tokenizer import load_tokenizer

    how = {name: parameters[name] for name in ("eos", "bos") if name in parameters}
    return load_tokenizer(parameters["tokenizer"], **how)


def _synthetic(options: TrainOptions) -> Recipe:
    if options.doc_mask:
        raise ConfigError(
            "--doc-mask with --dataset synthetic: random ids have no documents. Leave one of them out."
        )

    def dataset(split: str | None) -> Any:
        from penstock.read.synthetic import SyntheticDataset

        # Another seed, other rows: what is evaluated on was never trained on.
        return SyntheticDataset(
            SYNTHETIC_VOCABULARY, options.seq_len, ENDLESS, seed=1 if split == "val" else 0
        )

    return Recipe("", "loader_", options.seq_len, lambda: SYNTHETIC_VOCABULARY, dataset)


def _from_table(options: TrainOptions, resolved: Settings) -> Recipe:
    """The data that a configuration file names."""
    table = resolved.data
    assert table is not None  # the options were checked
    seq_len = table.parameters.get("seq_len") or next(
        (t.parameters["seq_len"] for t, _ in table.parts.values()), None
    )
    if seq_len is None:
        raise ConfigError(
            f"{table.where}: does not say how long a row is, so no model can be built; give seq_len"
        )
    split_seen = any(
        "split" in part.parameters for part in (table, *(part for part, _ in table.parts.values()))
    )
    if options.eval_every and (table.kind != "text" or split_seen):
        raise ConfigError(
            f"--eval-every with {table.where} of kind {table.kind!r}{' and its own split' * split_seen}: there is nothing "
            "to tell training and validation apart by. Give text without a split, or --eval-every 0."
        )
    if options.doc_mask:
        table = _with_positions(table)
    # Text's ids are counted without the text: a server that cannot be reached now may be there again later.
    shared = _Once(lambda: _tokenizer_of(table.parameters)) if table.kind == "text" else None

    def dataset(split: str | None) -> Any:
        chosen: dict[str, Any] = (
            {"split": split, "val_fraction": options.val_fraction} if split is not None else {}
        )
        if shared is not None:
            chosen["tokenizer"] = shared()
        described = replace(table, parameters={**table.parameters, **chosen})
        return described.build(resolved.text_arguments())

    made = _Once(lambda: dataset("train" if options.eval_every else None))
    return Recipe(
        *_called(table.parameters.get("urls")),
        seq_len,
        lambda: (
            int(shared().vocab_size) if shared is not None else _ids(made(), options, table.where)
        ),
        lambda split: made() if split != "val" else dataset(split),
    )


def _with_positions(table: DatasetConfig) -> DatasetConfig:
    """The same data, whose batches say where their documents begin: of a mixture, all parts."""
    if table.kind == "synthetic":
        raise ConfigError(
            f"--doc-mask with {table.where} of kind 'synthetic': random ids have no documents. Leave one of them out."
        )
    if table.kind == "mixture":
        return replace(
            table, parts={name: (_with_positions(one), w) for name, (one, w) in table.parts.items()}
        )
    return replace(table, parameters={**table.parameters, "positions": True})


def _ids(dataset: Any, options: TrainOptions, where: str) -> int:
    """How many ids a dataset has."""
    from penstock.sources.mixture import Mixture

    if isinstance(dataset, Mixture):
        return max(_ids(part, options, where) for part, _ in dataset.parts.values())
    if hasattr(dataset, "tokenizer"):
        return int(dataset.tokenizer.vocab_size)
    known = getattr(dataset, "vocab_size", options.vocab_size)
    if known is None:
        raise ConfigError(
            f"{where}: files of token ids do not say how many ids there are; give --vocab-size"
        )
    return int(known)


class _Once:
    """A value that is made when it is first needed, whichever thread needs it first."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: list[Any] = []

    def __call__(self) -> Any:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


def make_loader(
    recipe: Recipe,
    options: TrainOptions,
    resolved: Settings,
    *,
    split: str | None,
    telemetry: Telemetry | None,
    device: str | None,
    states: list[dict[str, Any]] | None = None,
) -> AsyncDataLoader:
    """A loader of this rank's share, not yet started."""
    from penstock.loader import AsyncDataLoader

    arguments = resolved.loader_arguments(BATCH) | {"device": device}
    if split == "val":
        arguments |= {"epochs": None, "shuffle": False, "warmup_batches": 0}
        if arguments["prefetch_size"] == "auto":
            del arguments["prefetch_size"]
    shard = current_shard()
    # The trainer's ranks end together by an agreement of their own, so the loader is told that it stands alone;
    # a last batch that is not full would be one that other ranks do not have.
    if shard.mod > 1:
        arguments["drop_last"] = True
    loader = AsyncDataLoader(recipe.dataset(split), shard=shard, **arguments)
    if telemetry is not None:
        loader.observe(telemetry)
    if states is not None:
        loader.load_state_dict(states)
    return loader


class StandIn:
    """Batches of made-up ids, for steps without data. The same ids for the same step, whatever the number of ranks."""

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        batch_size: int,
        accumulate: int,
        *,
        doc_mask: bool,
        device: Any,
    ) -> None:
        from penstock.read.synthetic import SyntheticDataset

        self._rows = SyntheticDataset(vocab_size, recipe.seq_len, ENDLESS, seed=2)
        self._shape = (batch_size, recipe.seq_len)
        self._accumulate, self._doc_mask, self._device = accumulate, doc_mask, device
        self._shard = current_shard()

    def __call__(self, step: int, n: int) -> Batch:
        """The n-th micro-step of a step."""
        import numpy as np
        import torch

        from penstock.encode.batch import Batch

        size, seq_len = self._shape
        first = ((step * self._accumulate + n) * size) * self._shard.mod
        numbers = [first + row * self._shard.mod + self._shard.rem for row in range(size)]
        ids = torch.from_numpy(self._rows.__getitems__(numbers).astype(np.int64)).to(self._device)
        batch = Batch(
            ids[:, :-1].contiguous(),
            ids[:, 1:].contiguous(),
            epoch=0,
            index=0,
            synthetic=True,
            _tokens=size * seq_len,
        )
        if self._doc_mask:  # a row is a document
            batch.positions = (
                torch.arange(seq_len, device=self._device).expand(size, seq_len).contiguous()
            )
            batch.cu_seqlens = torch.arange(
                0, size * seq_len + 1, seq_len, dtype=torch.int32, device=self._device
            )
        return batch
