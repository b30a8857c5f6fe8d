"""Write the option tables of docs/reference.md from the declarations in `penstock.options`.

PYTHONPATH=src python docs/make_settings.py
"""

from __future__ import annotations

import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from penstock.options import LoaderOptions, RemoteOptions, TextOptions, options_of
from penstock.sources.prepared import PreparedOptions

PAGE = Path(__file__).with_name("reference.md")
SECTIONS = {
    "AsyncDataLoader": (
        LoaderOptions,
        "`AsyncDataLoader(dataset, …)`. The first six can be positional.",
    ),
    "TextDataset": (TextOptions, "`TextDataset(urls, …)`, by keyword only."),
    "PreparedDataset": (PreparedOptions, "`PreparedDataset(path, …)`, by keyword only."),
    "RemoteOptions": (
        RemoteOptions,
        "`TextDataset(…, remote=RemoteOptions(…))`, or a dict of these options.",
    ),
}
STREAM = {
    *("shuffle", "seed", "lanes", "config", "tokenizer", "seq_len", "text_field", "packing"),
    *("split", "filter", "transform", "format", "separator", "eos", "bos"),
    *("chunk_bytes", "shuffle_chunks", "shuffle_blocks"),
}
"""Options that affect the stream: a state does not load if they differ."""


def table(cls: Any) -> str:
    """Return the options of a class as a Markdown table."""
    rows = ["| option | accepts | default | |", "|---|---|---|---|"]
    for name, each in options_of(cls).items():
        shown = "" if each.default is MISSING else each.show(each.default)
        default = "required" if each.default is MISSING else f"`{shown}`" if shown else ""
        accepts = re.sub(r"text that matches \S+?(?=, or|$)", "text", each.needs())
        mark = " ●" if name in STREAM else ""
        rows.append(f"| `{name}`{mark} | {accepts} | {default} | {each.help} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with its generated sections replaced."""
    for name, (cls, intro) in SECTIONS.items():
        head, found, rest = text.partition(f"\n### {name}\n")
        assert found, name
        _, heading, tail = rest.partition("\n##")
        text = f"{head}{found}\n{intro}\n\n{table(cls)}\n{heading}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
