"""Options that several commands have, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import complete

AS = "As for the run."

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", "--batch-size", metavar="N", help="Rows of a batch.", show_default="16"
    ),
]
CardConfig = Annotated[
    str | None,
    typer.Option(
        "--dataset-config",
        "--config",
        metavar="NAME",
        help="A configuration of the dataset's card.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting of the loader: --set n_workers=2. May be repeated.",
        autocompletion=complete.settings,
    ),
]  # fmt: skip
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Workers and prefetch by name.",
        autocompletion=complete.presets,
    ),
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", metavar="N", help=AS, show_default="1024")]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings", metavar="FILE", help="A TOML or JSON file with the run's data and settings."
    ),
]
Shuffle = Annotated[bool | None, typer.Option("--shuffle/--no-shuffle", help=AS)]
Split = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="train or val, as for the run.", autocompletion=complete.splits)
]  # fmt: skip
TextField = Annotated[
    str | None, typer.Option("--text-field", metavar="NAME", help=AS, show_default="text")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME",
        help=AS,
        show_default="byte",
        autocompletion=complete.tokenizers,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", help="How many workers.", show_default="the cores at hand", min=0
    ),
]
