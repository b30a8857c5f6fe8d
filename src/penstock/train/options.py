"""The options of `penstock train`: one dataclass for the command line, the file and the help.

Options of the loader (workers, prefetch, warmup, …) are settings; see `penstock.settings`. Does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, Literal

from penstock.config import gpu_is_here, local_rank
from penstock.errors import ConfigError
from penstock.options import option, options, options_of
from penstock.settings import RawSetting, Settings, load, read_file, read_source
from penstock.types import Packing
from penstock.watch.heartbeat_reader import FOLDER

Parallel = Literal["single", "ddp", "fsdp"]

STEPS, BATCH, LEARNING_RATE = 100, 8, 1e-3
"""Defaults if neither the command line nor a file sets them."""

HTML = r"auto|.*\.html?"

DATA, MODEL, TRAINING, RANKS = "Data", "Model", "Training", "Where it runs"
SAVING, FAULTS, WATCHING = "Checkpoints", "When data fails", "Watching"


@options
class TrainOptions:
    """Options of `penstock train`.

    dataset: fineweb_edu, fineweb_edu_local (with --local-path), stdlib, synthetic, or an address:
        hf://…, s3://…, https://…, a file, a folder or a glob. Defaults to the data table of the --config
        file.
    local_path: File for fineweb_edu_local.
    tokenizer: byte, a tokenizer.json, a .tiktoken file, a Hub name such as gpt2, or stdlib: one
        trained on Python's standard library.
    dataset_config: A configuration from a Hub dataset's card, such as sample-10BT.
    text_field: Column or field that holds the text.
    seq_len: Tokens per row. The cost of attention grows with its square.
    packing: How documents are packed into rows. concat loses no token; best_fit pads instead of
        cutting documents; bos starts each row with a document.
    doc_mask: Attend only within documents.
    vocab_size: Number of ids, for files of token ids, which do not contain it.
    size: Size of the model.
    dropout: Share of activations to drop.
    compile: Use torch.compile, block by block: a slower start and faster steps.
    dtype: Type to compute in. auto: bfloat16 on GPUs that support it, otherwise float32.
    steps: Step at which to stop. Defaults to 100, or to the end of the epochs that a file sets.
    batch: Rows of a micro-step on each rank. In a file: batch_size.
    accumulate: Micro-steps per step. More take time, not memory.
    global_batch: Rows of a step on all ranks. Sets --accumulate, so that another number of ranks
        trains on the same rows.
    lr: Maximum learning rate. In a file: learning_rate.
    lr_warmup: Steps over which the learning rate rises. Defaults to a tenth of all steps, at most
        100.
    lr_floor: Final learning rate, as a share of the maximum.
    weight_decay: Weight decay of the matrices.
    clip: Maximum gradient norm; 0 disables clipping.
    seed: Seed of weights, dropout and the order of the data. In a file: seed of the loader table.
    eval_every: Steps between evaluations on documents excluded from training; 0 disables them.
    eval_batches: Batches per evaluation, over all ranks. They stay in memory.
    val_fraction: Share of the documents reserved for evaluation.
    prewarm: Run a step before the first one to load kernels, without changing any result.
    ddp: 1: DDP. 0: a single process. Defaults to DDP if there are several processes.
    fsdp: Shard the model over the ranks (FSDP2) instead of copying it (DDP).
    device: auto, cpu, cuda or cuda:N. auto: this rank's GPU if there is one.
    collective_timeout: Seconds to wait for other ranks in a collective.
    out: Folder for heartbeat, checkpoints and report.
    save_every: Steps between checkpoints; 0: only at the end and on SIGTERM.
    save_last: Save a checkpoint at the end.
    keep: Checkpoints to keep.
    resume: Continue from the newest complete checkpoint, or from the given one.
    grace: Seconds that saving may take after SIGTERM before the process exits.
    loader_timeout: Seconds to wait for the vocabulary, and then for the first batch.
    stall_timeout: Seconds to wait for any other batch.
    synthetic_on_fail: If a rank has no data, train all ranks on synthetic data until all have real
        data again. Otherwise all ranks stop.
    report: Write the report page at the end, to this file or next to the heartbeat.
    trace: Write a trace of the loader's threads to this file, for Perfetto.
    metrics_port: Serve Prometheus metrics at this port plus the local rank; 0: any free port.
    tensorboard: Folder for TensorBoard files.
    log_every: Steps between console lines; 0: a line about every two seconds.
    """

    _: KW_ONLY
    dataset: str | None = option(default=None, group=DATA)
    local_path: Path | None = option(default=None, group=DATA)
    tokenizer: str = option(default="byte", group=DATA)
    dataset_config: str | None = option(default=None, group=DATA)
    text_field: str = option(default="text", group=DATA)
    seq_len: int = option(default=256, minimum=8, below=1 << 20, group=DATA)
    packing: Packing = option(default="concat", group=DATA)
    doc_mask: bool = option(default=False, group=DATA, implied="1")
    vocab_size: int | None = option(default=None, minimum=2, group=DATA)
    size: Literal["toy", "mini", "small", "medium", "125m"] = option(default="toy", group=MODEL)
    dropout: float = option(default=0.0, minimum=0, below=1, group=MODEL)
    compile: bool = option(default=False, group=MODEL, implied="1")
    dtype: Literal["auto", "float32", "bfloat16"] = option(default="auto", group=MODEL)
    steps: int | None = option(default=None, minimum=1, group=TRAINING)
    batch: int = option(default=BATCH, minimum=1, group=TRAINING)
    accumulate: int = option(default=1, minimum=1, group=TRAINING)
    global_batch: int | None = option(default=None, minimum=1, group=TRAINING)
    lr: float = option(default=LEARNING_RATE, minimum=0, group=TRAINING)
    lr_warmup: int | None = option(default=None, minimum=0, group=TRAINING)
    lr_floor: float = option(default=0.1, minimum=0, group=TRAINING)
    weight_decay: float = option(default=0.1, minimum=0, group=TRAINING)
    clip: float = option(default=1.0, minimum=0, group=TRAINING)
    seed: int = option(default=0, minimum=0, group=TRAINING)
    eval_every: int = option(default=0, minimum=0, group=TRAINING)
    eval_batches: int = option(default=8, minimum=1, group=TRAINING)
    val_fraction: float = option(default=0.005, minimum=1e-9, below=1, group=TRAINING)
    prewarm: bool = option(default=False, group=TRAINING, implied="1")
    ddp: bool | None = option(default=None, none="auto", group=RANKS, implied="1")
    fsdp: bool = option(default=False, group=RANKS, implied="1")
    device: str = option(default="auto", pattern=r"auto|cpu|cuda(:\d+)?", group=RANKS)
    collective_timeout: float = option(default=600.0, group=RANKS, minimum=0.001, below=1e7)
    out: Path = option(default=Path(FOLDER), group=SAVING)
    save_every: int = option(default=0, minimum=0, group=SAVING)
    save_last: bool = option(default=True, group=SAVING, implied="1")
    keep: int = option(default=3, minimum=1, group=SAVING)
    resume: str | None = option(default=None, group=SAVING, implied="newest")
    grace: float = option(default=30.0, group=SAVING, minimum=0.001, below=1e7)
    loader_timeout: float = option(default=60.0, group=FAULTS, minimum=0.001, below=1e7)
    stall_timeout: float = option(default=300.0, group=FAULTS, minimum=0.001, below=1e7)
    synthetic_on_fail: bool = option(default=False, group=FAULTS, implied="1")
    report: str | None = option(default=None, pattern=HTML, group=WATCHING, implied="auto")
    trace: Path | None = option(default=None, group=WATCHING)
    metrics_port: int | None = option(default=None, minimum=0, below=1 << 16, group=WATCHING)
    tensorboard: Path | None = option(default=None, group=WATCHING)
    log_every: int = option(default=0, minimum=0, group=WATCHING)

    @property
    def checkpoints(self) -> Path:
        """The folder for checkpoints."""
        return self.out / "checkpoints"


OPTIONS = options_of(TrainOptions)
ALSO_SETTINGS = {"batch": "batch_size", "lr": "learning_rate", "seed": "seed"}
"""Options that are also settings of the loader, with the names of the settings."""
DESCRIBE_DATA = {"tokenizer", "dataset_config", "text_field", "seq_len", "packing"}
"""Options that the [data] table of a file replaces."""


def flag(name: str) -> str:
    """Return an option's name on the command line."""
    return "--" + name.replace("_", "-")


def resolve(
    config: str | Path | None,
    given: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> tuple[TrainOptions, Settings]:
    """Return the options and the loader's settings.

    given: options of the command line. overrides: settings of its `--set`. Both take precedence
    over the environment, and that over the file.
    """
    written = {flag(name): value for name, value in given.items()}
    chosen = read_source(written, {flag(name): name for name in OPTIONS}, "", OPTIONS)
    sets = {**(overrides or {})}
    sets |= {ALSO_SETTINGS[name]: chosen[name].value for name in ALSO_SETTINGS if name in chosen}
    settings = load(config, overrides=sets, preset=preset, origin="command line --set ")
    if settings.file is not None:
        chosen = _from_file(settings.file) | chosen
    values = {name: one.value for name, one in chosen.items()}
    for name, setting in {**ALSO_SETTINGS, "device": "device"}.items():
        if settings[setting] is not None:
            values.setdefault(name, settings[setting])
    if settings["epochs"] is None:
        values.setdefault("steps", STEPS)
    made = TrainOptions(**values)
    _check(made, settings)
    if made.dataset is None and (twice := sorted(chosen.keys() & DESCRIBE_DATA)):
        raise ConfigError(f"{chosen[twice[0]].where}: set it in [data] of {settings.file} instead")
    return made, settings


def _from_file(path: Path) -> dict[str, RawSetting]:
    """Return the options in the [train] table of a file."""
    file = read_file(path)
    table = dict(file.table("train") or {})
    for name in table.keys() & ALSO_SETTINGS.keys():
        raise ConfigError(f"{file.where('train', name)}: in a file it is {ALSO_SETTINGS[name]}")
    for name in table.keys() & {"local_path", "tensorboard"}:
        table[name] = path.parent / Path(table[name]).expanduser()
    names = {name: name for name in OPTIONS}
    return read_source(table, names, file.where("train") + " ", OPTIONS)


def _check(options: TrainOptions, settings: Settings) -> None:
    """Raise ConfigError for options that exclude each other."""
    out, is_local = options.out, options.dataset == "fineweb_edu_local"
    if is_local != (options.local_path is not None):
        raise ConfigError("--dataset fineweb_edu_local and --local-path FILE need each other")
    if options.dataset is None and settings.data is None:
        raise ConfigError("no data: give --dataset (stdlib needs nothing) or a file with [data]")
    if out.suffix == ".jsonl" or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out {out}: must be a folder")
    if options.ddp is False and options.fsdp:
        raise ConfigError("--ddp 0 and --fsdp contradict each other: use one of them")
    if options.global_batch is not None and options.accumulate != 1:
        raise ConfigError("--global-batch sets --accumulate: use one of them")
    # Without them, the step makes its batch itself, without a time limit.
    if options.synthetic_on_fail and (not settings["prefetch"] or settings["n_workers"] == 0):
        raise ConfigError("--synthetic-on-fail needs prefetch=on and at least one worker")


# Values derived from the options


def parallel(options: TrainOptions, world: int) -> Parallel:
    """Return how the ranks share the work."""
    if options.ddp is False and world > 1:
        raise ConfigError(f"--ddp 0 with {world} processes: each would train its own model")
    if options.fsdp:
        return "fsdp"
    return "ddp" if options.ddp or world > 1 else "single"


def micro_steps(options: TrainOptions, world: int) -> int:
    """Return the number of micro-steps per step."""
    total, rows = options.global_batch, options.batch * world
    if total is None:
        return options.accumulate
    if total % rows:
        what = f"--batch {options.batch} on {world} rank{'s' * (world > 1)}"
        raise ConfigError(f"--global-batch {total}: must be a multiple of {rows}, {what}")
    return total // rows


def device_name(options: TrainOptions) -> str | None:
    """Return the device for batches, or None for the CPU. Called before torch is imported."""
    if options.device not in ("auto", "cuda"):
        return None if options.device == "cpu" else options.device
    return f"cuda:{local_rank()}" if options.device == "cuda" or gpu_is_here() else None


def add_implied(arguments: list[str]) -> list[str]:
    """Add the implied value to options without one: `--resume` means `--resume newest`."""
    implied = {flag(name): each.implied for name, each in OPTIONS.items() if each.implied}
    result: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        value = implied.get(argument)
        result += [argument] if value is None or following[0:1] != "-" else [argument, value]
    return result
