"""`penstock prepare`: tokenize a corpus once."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict
from typing import Any, Literal

from penstock.cli.command import print_json, progress
from penstock.options import option, options


@options
class PrepareOptions:
    """Options of `penstock prepare`.

    source: hf://…, s3://…, https://…, a short name or a path.
    out: A folder, or s3://…, gs://…, az://….
    tokenizer: byte, gpt2, a file or a Hub name.
    filter: Rows to keep, such as 'score >= 3'. If repeated, all must hold.
    text_field: Column or field with the text. Defaults to text.
    split: train or val.
    card_config: A configuration from the dataset's card on the Hub.
    on_bad_record: raise, skip or quarantine:FILE. Defaults to raise.
    engine: Where to run: on this machine or on a Ray cluster.
    ray_address: A Ray cluster. Defaults to RAY_ADDRESS, or this machine.
    workers: Cores to use. Defaults to all that this process may use.
    slice: Part I of N to make, from 0 on, such as 0/16, for job arrays.
    json: Print JSON.
    """

    source: list[str]
    _: KW_ONLY
    out: str
    tokenizer: str = "byte"
    filter: list[str] | None = None
    text_field: str | None = None
    split: str | None = None
    card_config: str | None = None
    on_bad_record: str | None = None
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    workers: int | None = option(default=None, minimum=1)
    slice: str | None = option(default=None, pattern=r"\d+/\d+")
    json: bool = False


def prepare(given: PrepareOptions) -> None:
    """Tokenize a corpus once, for PreparedDataset.

    A repeated run makes only the missing chunks. Exit code 1: an error.
    """
    from penstock.prepare import prepare as run

    part = None if given.slice is None else given.slice.split("/")
    names = ("filter", "text_field", "split", "on_bad_record")
    text: dict[str, Any] = {name: getattr(given, name) for name in names}
    text["remote"] = {"config": given.card_config} if given.card_config else None
    with progress() as show:
        done = run(
            given.source[0] if len(given.source) == 1 else given.source,
            tokenizer=given.tokenizer, out=given.out, workers=given.workers, engine=given.engine,
            slice=None if part is None else (int(part[0]), int(part[1])),
            ray_address=given.ray_address,
            progress=lambda now: show(now.chunks_done, now.chunks, now.describe_progress()),
            **{name: value for name, value in text.items() if value is not None},
        )  # fmt: skip
    print_json(asdict(done)) if given.json else print(done.as_text())
