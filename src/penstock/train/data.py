"""The data of a run: loaders for training and evaluation, and synthetic replacement batches.

Does not import torch, so that the loader can start reading before torch is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import current_shard, write_atomically
from penstock.encode.batch import Batch
from penstock.errors import ConfigError, SourceError
from penstock.feed.collectives import Ranks
from penstock.feed.fallback import BackgroundOpen
from penstock.loader import AsyncDataLoader
from penstock.settings import DatasetConfig, Settings
from penstock.tools.data_choice import LOCAL, text_path
from penstock.train.options import TrainOptions
from penstock.types import IGNORE, Shard

if TYPE_CHECKING:
    from penstock.watch.telemetry import Telemetry

ARRAYS = ("inputs", "targets", "positions", "cu_seqlens")
"""Fields of a batch that the model uses."""
SYNTHETIC_VOCABULARY = STDLIB_VOCABULARY = 8192
"""The vocabulary sizes of `--dataset synthetic` and `--tokenizer stdlib`."""
ENDLESS = 1 << 40
"""Rows of synthetic data: more than any run reads."""


class TrainData:
    """The data of a run. Starts loading the vocabulary on a thread."""

    def __init__(self, options: TrainOptions, settings: Settings) -> None:
        table = _named(options) if options.dataset is not None else settings.data
        assert table is not None  # the options were checked
        parts = [table, *(part for part, _ in table.parts.values())]
        lengths = [each.parameters["seq_len"] for each in parts if "seq_len" in each.parameters]
        if not lengths:
            raise ConfigError(f"{table.where}: seq_len is missing, so no model can be built")
        splits = table.kind in ("text", "synthetic") and "split" not in table.parameters
        if options.eval_every and not splits:
            raise ConfigError(f"--eval-every needs text without a split; {table.where} is not")
        self._options, self._settings = options, settings
        self._table = _with_positions(table) if options.doc_mask else table
        self.seq_len: int = lengths[0]
        urls = table.parameters.get("urls", ())
        urls = [urls] if isinstance(urls, str | os.PathLike) else urls
        is_fineweb = any(_is_fineweb_edu(str(url)) for url in urls)
        self.title = "FineWeb-Edu " if is_fineweb else ""
        self.prefix = "fineweb_loader_" if is_fineweb else "loader_"
        """The prefix of the loader's events."""
        self._opening = BackgroundOpen(self._open)

    def _open(self) -> Any:
        """Return the tokenizer for text, or the dataset for other data."""
        if self._table.kind == "text":
            return _load_tokenizer(self._table.parameters)
        return self._table.build(self._settings.text_arguments())

    def vocab_size(self, timeout_s: float) -> int:
        """Return the number of ids. Raise LoaderTimeout if it is not known in time."""
        return self._count_ids(self._opening.result(timeout_s))

    def _count_ids(self, data: Any) -> int:
        if parts := getattr(data, "parts", None):
            return max(self._count_ids(part) for part, _ in parts.values())
        data = getattr(data, "tokenizer", data)
        count = getattr(data, "vocab_size", self._options.vocab_size)
        if count is None:
            raise ConfigError(f"{self._table.where}: unknown number of ids; give --vocab-size")
        return int(count)

    def _dataset(self, split: str | None) -> Any:
        """Return the dataset of a split: "train", "val", or None for all data."""
        opened, table, options = self._opening.result(), self._table, self._options
        parameters = dict(table.parameters)
        if table.kind == "text":
            parameters["tokenizer"] = opened
            if options.dataset is not None:
                parameters["urls"] = text_path(options.dataset, options.local_path)
            if split is not None:
                parameters |= {"split": f"{split}:{options.val_fraction:g}"}
        elif split == "val":  # other rows than those for training
            parameters["seed"] = parameters.get("seed", 0) + 1
        else:
            return opened
        return replace(table, parameters=parameters).build(self._settings.text_arguments())

    def loader(
        self, telemetry: Telemetry, device: str | None, states: list[dict[str, Any]] | None = None
    ) -> AsyncDataLoader:
        """Return this rank's training loader, which is not started yet."""
        arguments = self._settings.loader_arguments(self._options.batch) | {"device": device}
        shard = current_shard()
        if shard.mod > 1:
            # With an explicit shard, ranks do not coordinate: the feed decides where to end. Other
            # ranks might not have a smaller last batch.
            arguments["drop_last"] = True
        split = "train" if self._options.eval_every else None
        loader = AsyncDataLoader(self._dataset(split), shard=shard, **arguments)
        loader.observe(telemetry)
        if states is not None:
            loader.load_state_dict(states)
        return loader

    def validation_loader(self) -> AsyncDataLoader:
        """Return a loader for all validation documents, in order."""
        arguments = self._settings.loader_arguments(self._options.batch)
        arguments |= {"device": None, "epochs": None, "shuffle": False, "lanes": 1}
        arguments |= {"warmup_batches": 0, "prefetch_size": 1, "shard": Shard(1, 0)}
        return AsyncDataLoader(self._dataset("val"), **arguments)

    def close(self) -> None:
        """Stop waiting for the vocabulary."""
        self._opening.close()


def _named(options: TrainOptions) -> DatasetConfig:
    """Return the dataset that `--dataset` and its options describe."""
    where = f"--dataset {options.dataset}"
    if options.dataset == "synthetic" and not os.path.exists("synthetic"):
        parameters = {"vocab_size": SYNTHETIC_VOCABULARY, "num_samples": ENDLESS, "seed": 0}
        parameters["seq_len"] = options.seq_len
        return DatasetConfig(kind="synthetic", where=where, parameters=parameters)
    names = ("tokenizer", "seq_len", "text_field", "packing")
    described: dict[str, Any] = {name: getattr(options, name) for name in names}
    described |= {"urls": options.dataset, "remote": {"config": options.dataset_config}}
    return DatasetConfig(kind="text", where=where, parameters=described)


def _is_fineweb_edu(address: str) -> bool:
    """Return True for FineWeb-Edu by name or address. A file of that name takes precedence."""
    from penstock.read.listing import SHORT_NAMES

    is_name = address == LOCAL or (address == "fineweb_edu" and not os.path.exists(address))
    return is_name or bool(re.match(rf"{re.escape(SHORT_NAMES['fineweb_edu'])}([/@]|$)", address))


def _with_positions(table: DatasetConfig) -> DatasetConfig:
    """Return the dataset with positions in its batches."""
    if table.kind == "synthetic":
        raise ConfigError(f"--doc-mask with {table.where}: synthetic data has no documents")
    parts = {name: (_with_positions(part), weight) for name, (part, weight) in table.parts.items()}
    own = {} if table.kind == "mixture" else {"positions": True}
    return replace(table, parameters={**table.parameters, **own}, parts=parts)


def _load_tokenizer(parameters: Mapping[str, Any]) -> Any:
    from penstock.encode.tokenizer import load_tokenizer

    name = parameters["tokenizer"]
    special = {key: parameters[key] for key in ("eos", "bos") if key in parameters}
    return load_tokenizer(_stdlib_tokenizer() if name == "stdlib" else name, **special)


def _stdlib_tokenizer() -> Path:
    """Return the path of a tokenizer for the standard library's text, trained on first use."""
    from penstock.encode.train_bpe import train_tokenizer
    from penstock.tools.demo_corpus import documents, write_stdlib

    path = write_stdlib().with_suffix(".tokenizer.json")
    if not path.exists():
        text = "\n".join(text for _, text in documents())
        write_atomically(path, train_tokenizer(text.encode(), STDLIB_VOCABULARY))
    return path


class ValidationData:
    """The batches of an evaluation: the same documents for any number of ranks.

    Rank 0 reads them before the first pass and distributes them to the ranks, which keep them in
    memory. A `for` starts a pass. All ranks have the same number of batches; padding has no
    targets.
    """

    def __init__(self, data: TrainData, options: TrainOptions, ranks: Ranks, device: Any) -> None:
        self._data, self._options, self._ranks, self._device = data, options, ranks, device
        self._batches: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass over this rank's batches."""
        from penstock.train.distributed import scatter

        if not self._batches:
            self._batches = scatter(self._ranks, self._deal)
            for batch, name in product(self._batches, ARRAYS):
                if (array := getattr(batch, name)) is not None:
                    setattr(batch, name, array.to(self._device))
        return iter(self._batches)

    def _deal(self) -> list[list[Batch]]:
        import torch

        batches: list[Batch] = []
        with self._data.validation_loader() as loader:
            while len(batches) < self._options.eval_batches:
                batch = loader.next_batch(self._options.stall_timeout)
                if batch is None:
                    raise SourceError("there are no validation documents: raise --val-fraction")
                batch.to_torch()
                # Without its origin, which cannot be sent to other ranks.
                arrays = {name: getattr(batch, name) for name in ARRAYS}
                batches.append(Batch(**arrays, epoch=0, index=0))
        padding = replace(batches[0], targets=torch.full_like(batches[0].targets, IGNORE))
        world = self._ranks.world
        batches += [padding] * (-len(batches) % world)
        return [batches[rank::world] for rank in range(world)]


class SyntheticBatches:
    """Synthetic batches: the same ids for the same step, for any number of ranks.

    Each row is one document, so a document mask has no effect.
    """

    def __init__(
        self, options: TrainOptions, data: TrainData, vocab_size: int, device: Any
    ) -> None:
        from penstock.read.token_files import SyntheticDataset

        self._rows = SyntheticDataset(vocab_size, data.seq_len, ENDLESS, seed=2)
        self._size, self._device, self._shard = options.batch, device, current_shard()

    def __call__(self, step: int, n: int) -> Batch:
        """Return the n-th batch of a step."""
        import numpy as np
        import torch

        size, shard = self._size, self._shard
        first = ((step << 16) + n) * size * shard.mod + shard.rem
        rows = self._rows.__getitems__([first + row * shard.mod for row in range(size)])
        ids = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 0, 0, synthetic=True)
        batch.tokens = size * self._rows.seq_len
        return batch
