"""Choose the source for a dataset. The modules of each kind of data are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import ConfigError
from penstock.sources.base import Source


def as_source(
    dataset: Any,
    preprocess: Callable[..., Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Source:
    """Return the source of a dataset."""
    if hasattr(dataset, "as_source"):
        if preprocess is not None or collate is not None:
            raise ConfigError(
                f"{'collate' if preprocess is None else 'preprocess'}=… needs a dataset of samples; "
                f"{type(dataset).__name__} returns packed rows of ids. Use device_preprocess=…, or "
                "pass a map-style dataset."
            )
        source: Source = dataset.as_source()
        return source
    if not isinstance(dataset, str | bytes | dict):
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if map_style and not _is_iterable_dataset(dataset):
            from penstock.sources.map_style import RowsSource, SampleSource

            rows = all(hasattr(dataset, name) for name in ("boundaries", "dtype", "seq_len"))
            if rows and preprocess is None and collate is None:
                return RowsSource(dataset)
            return SampleSource(dataset, preprocess, collate)
        if callable(dataset) or isinstance(dataset, Iterable):
            from penstock.sources.samples import IterableSource

            return IterableSource(dataset, preprocess, collate)
    raise ConfigError(
        f"dataset={dataset!r:.80}: must be a TextDataset, as in TextDataset(path, tokenizer=…, "
        "seq_len=…), a PreparedDataset, a TokenFileDataset, a SyntheticDataset, a Mixture, an "
        "object with __len__ and __getitem__, or an iterable"
    )


def _is_iterable_dataset(dataset: Any) -> bool:
    """Return True for PyTorch's iterable datasets, whose `__getitem__` only raises."""
    return any(
        kind.__name__ == "IterableDataset" and "torch" in kind.__module__
        for kind in type(dataset).__mro__
    )
