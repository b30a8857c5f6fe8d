"""`penstock demo`: the loader at work on text that is on every machine."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.watch.attribution import band

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.dataset import TextDataset
    from penstock.feed.beat import Heartbeat
    from penstock.loader import AsyncDataLoader

BATCH, SEQ_LEN, VOCABULARY = 16, 1024, 8192


def demo(
    steps: Annotated[int, typer.Option(help="Steps to run.", min=2)] = 400,
    step_ms: Annotated[float, typer.Option(help="How long the stand-in for a training step takes.", min=0)] = 10.0,
    workers: Annotated[int | None, typer.Option(help="Worker threads; default: the cores at hand.", min=0)] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where its heartbeat and its report go.")] = Path(
        "artifacts/demo"
    ),
) -> None:
    """Stream the standard library's text through the loader, with a timed stand-in for training."""
    from rich.console import Console

    from penstock.feed.beat import Heartbeat

    console = Console(soft_wrap=True, highlight=False)
    data = _dataset()
    _introduce(console, data)

    def make() -> AsyncDataLoader:
        from penstock.loader import AsyncDataLoader

        return AsyncDataLoader(data, BATCH, shuffle=True, seed=42, n_workers=workers)

    half = steps // 2
    with make() as loader:
        _warm_up(console, loader)
        heartbeat = Heartbeat(folder, observed=loader.telemetry, settings={"batch_size": BATCH, "seq_len": SEQ_LEN})
        with heartbeat:
            digests, state = _run(console, loader, heartbeat, steps, half, step_ms / 1e3)
        _summary(console, loader, state)
    with make() as loader:
        loader.load_state_dict(state)
        same = all(_digest(loader) == expected for expected in digests[half:])
    outcome = "bit for bit the same" if same else "NOT the same"
    console.print(
        f"resume       from the state after step {half}: the {steps - half} batches that follow are {outcome}"
    )
    _report(console, heartbeat.path, folder / "report.html")
    if not same:
        raise typer.Exit(1)


def _report(console: Console, heartbeat: Path, page: Path) -> None:
    """What the run wrote of itself, as a page; where the library that draws it is installed."""
    if importlib.util.find_spec("plotly") is None:
        console.print("report       needs plotly: pip install 'penstock[report]', then penstock report")
        return
    from penstock.watch.report import report

    console.print(f"report       {report(str(heartbeat)).write(page)}: open it in a browser")


def _dataset() -> TextDataset:
    """The standard library's text and a vocabulary trained on it, both made on first use."""
    from penstock.config import write_atomically
    from penstock.dataset import TextDataset
    from penstock.encode.train import train_tokenizer
    from penstock.read.stdlib import documents, write_stdlib

    parquet = write_stdlib()
    vocabulary = parquet.with_suffix(".tokenizer.json")
    if not vocabulary.exists():
        text = "\n".join(text for _, text in documents()).encode()
        write_atomically(vocabulary, train_tokenizer(text, VOCABULARY))
    return TextDataset(parquet, tokenizer=vocabulary, seq_len=SEQ_LEN)


def _introduce(console: Console, data: TextDataset) -> None:
    size = sum(file.size for file in data.files) / 1e6
    console.print(
        f"text         {data.files[0].name}: the interpreter's own library and manual, {size:.1f} MB of Parquet"
    )
    console.print(f"vocabulary   {data.tokenizer.size} ids, trained on that text; engine {data.tokenizer.engine.name}")
    console.print(f"batches      {BATCH} rows of {SEQ_LEN} tokens, shuffled")


def _warm_up(console: Console, loader: AsyncDataLoader) -> None:
    """As a trainer does: the loader is already at work while torch is imported."""
    first = loader.warmup(1, timeout=60)
    console.print(f"first batch  ready {first.wait_ms / 1e3:.2f} s after the loader was entered")
    if importlib.util.find_spec("torch") is not None:
        begun = time.perf_counter()
        importlib.import_module("torch")
        took = time.perf_counter() - begun
        console.print(f"meanwhile    torch was imported in {took:.2f} s, and {loader.queue_depth()} batches were made")


def _run(
    console: Console, loader: AsyncDataLoader, heartbeat: Heartbeat, steps: int, half: int, step_s: float
) -> tuple[list[str], dict[str, Any]]:
    """Take batches as a trainer would. Gives the digest of each, and the state half-way."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("step"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
    digests: list[str] = []
    state: dict[str, Any] = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, line="")
        while len(digests) < steps:
            digests.append(_digest(loader))
            if len(digests) == half:
                state = loader.state_dict()
            time.sleep(step_s)  # the stand-in for an accelerator at work
            heartbeat.progress(len(digests))
            stats = loader.stats()
            rate, wait = stats.tokens_per_s / 1e6, 100 * stats.data_wait
            line = f"{rate:.2f} M tokens/s  queue {loader.queue_depth()}  data wait {wait:.2f} %"
            progress.update(task, advance=1, line=line)
    return digests, state


def _summary(console: Console, loader: AsyncDataLoader, state: dict[str, Any]) -> None:
    stats = loader.stats()
    console.print(f"tokens       {stats.tokens} of {stats.documents} documents in {stats.wall_s:.1f} s")
    console.print(f"data wait    {100 * stats.data_wait:.2f} % of the time, which is {band(stats.data_wait)}")
    console.print(f"verdict      {stats.verdict}")
    console.print(f"state        {len(json.dumps(state))} bytes of JSON")


def _digest(loader: AsyncDataLoader) -> str:
    import numpy as np

    batch = next(loader)
    return hashlib.sha256(np.asarray(batch.inputs).tobytes()).hexdigest()
