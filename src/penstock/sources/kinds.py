"""Which kind of data a loader was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.dataset import TextDataset
from penstock.errors import ConfigError
from penstock.sources.source import Source


def as_source(
    dataset: Any,
    preprocess: Callable[..., Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Source:
    """A dataset, as the loader sees it. A kind's own modules are imported only where it is used."""
    if hasattr(dataset, "packed"):
        for name, value in (("preprocess", preprocess), ("collate", collate)):
            if value is not None:
                raise ConfigError(
                    f"{name}=… is for samples of your own; {type(dataset).__name__} gives packed rows of ids, which "
                    "need none. Use device_preprocess=…, or pass a map-style dataset."
                )
        if isinstance(dataset, TextDataset):
            from penstock.sources.files import TextSource

            return TextSource(dataset)
        return _packed(dataset)
    if isinstance(dataset, str | bytes | dict):
        raise ConfigError(
            f"dataset={dataset!r}: needs a dataset, not {type(dataset).__name__}. For text on disk: "
            "TextDataset(path, tokenizer=…, seq_len=…)"
        )
    if (
        hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
        and not _is_iterable_dataset(dataset)
    ):
        from penstock.sources.indexed import IndexedSource

        return IndexedSource(dataset, preprocess, collate)
    if callable(dataset) or isinstance(dataset, Iterable):
        from penstock.sources.iterable import IterableSource

        return IterableSource(dataset, preprocess, collate)
    raise ConfigError(
        f"dataset: cannot take batches from {type(dataset).__name__}. It needs a TextDataset, a TokenFileDataset, "
        "a SyntheticDataset, a Mixture, something with __len__ and __getitem__, or an iterable."
    )


def _packed(dataset: Any) -> Source:
    from penstock.sources.mixture import Mixture, MixtureSource
    from penstock.sources.text_stream import TextStreamSource

    if isinstance(dataset, Mixture):
        return MixtureSource(
            dataset, {name: as_source(part) for name, (part, _) in dataset.parts.items()}
        )
    return TextStreamSource(dataset)


def _is_iterable_dataset(dataset: Any) -> bool:
    """PyTorch's iterable datasets have a `__getitem__` too, which only raises."""
    return any(
        kind.__name__ == "IterableDataset" and "torch" in kind.__module__
        for kind in type(dataset).__mro__
    )
