"""What a shell offers for the values of options. Whatever else fits may be typed just as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.settings import PRESETS, SETTINGS

Complete = Callable[[str], list[str]]


def among(words: Iterable[str]) -> Complete:
    """Those of a few words that begin with what is there already."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def data_names(incomplete: str) -> list[str]:
    """Data that has a name: that of `train` and `smoke`, and short names for the Hub's."""
    from penstock.read.hub import SHORT_NAMES

    return among(sorted({*SHORT_NAMES, "fineweb_edu_local", "stdlib", "synthetic"}))(incomplete)


def address(incomplete: str) -> list[str]:
    """Short names, once a letter is there: without one, files are what is offered."""
    from penstock.read.hub import SHORT_NAMES

    return among(sorted(SHORT_NAMES))(incomplete) if incomplete else []


settings = among([f"{name}=" for name in SETTINGS])
presets = among(PRESETS)
splits = among(("train", "val"))
tokenizers = among(("byte", "gpt2"))
