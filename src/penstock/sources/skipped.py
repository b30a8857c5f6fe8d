"""Documents that are left out of a mixture: each of one part, though parts may have files of the same name.

In:    the addresses that each part leaves out.
Out:   the mixture's own, for its state; and again those of a part.
Where: the thread that creates a loader.
State: none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.types import Address

OF = "::"
"""Stands between the name of a part and that of its file."""


def of_mixture(parts: Mapping[str, Collection[Address]]) -> frozenset[Address]:
    """The addresses of all parts, each with its part's name."""
    return frozenset(
        one._replace(file=f"{name}{OF}{one.file}") for name, own in parts.items() for one in own
    )


def of_part(skip: Collection[Address], name: str, names: Collection[str]) -> frozenset[Address]:
    """The addresses of one part. Those that name none are everybody's: states that were saved before they did have them."""

    def owner(file: str) -> str:
        return max((each for each in names if file.startswith(f"{each}{OF}")), key=len, default="")

    mine = {
        one._replace(file=one.file.removeprefix(f"{name}{OF}"))
        for one in skip
        if owner(one.file) == name
    }
    return frozenset(mine | {one for one in skip if not owner(one.file)})
