"""The table as pictures: run by the driver in the environment that has matplotlib.

In:    peers.json, beside which the pictures go.
Out:   peers.svg and peers.png: rate, CPU time, memory and first batch of each entrant, as bars.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PANELS = {
    "rate|M tokens/s": ("M tokens/s (log)", True), "first batch, local|s": ("first batch, s", False),
    "CPU|s/M tokens": ("CPU s per M tokens (log)", True), "peak RSS|MB": ("peak RSS, MB", False),
}  # fmt: skip
COLOURS = {
    "limit": "#9e9e9e", "text, as documented": "#c97b3d", "text, with our tokenizer": "#d8b365", "tokens": "#7b9e87",
}  # fmt: skip
OURS = "#1f5fa8"


def main(folder: Path) -> None:
    """Draw them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entrants = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
    names = [name for name, numbers in entrants.items() if numbers["rate|M tokens/s"] is not None]
    if not names:
        return
    figure, axes = pyplot.subplots(
        1, len(PANELS), figsize=(15, 0.32 * len(names) + 1.2), sharey=True
    )
    for axis, (key, (title, logarithmic)) in zip(axes, PANELS.items(), strict=True):
        values = [entrants[name][key] or 0.0 for name in names]
        colours = [
            OURS if name.startswith("Penstock") else COLOURS[entrants[name]["group"]]
            for name in names
        ]
        axis.barh(names, values, color=colours, log=logarithmic)
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(folder / "peers.svg")
    figure.savefig(folder / "peers.png", dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
