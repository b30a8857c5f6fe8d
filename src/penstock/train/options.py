"""The options of the showcase trainer: what a run is.

In:    the command line, and the table `train` of a configuration file.
Out:   `TrainOptions`, checked, and the loader's settings beside them.
Where: the trainer's thread, before anything else.
State: none.

One table: the command line, the file and the documentation are made of the fields below. What belongs to the loader
(workers, prefetch, warmup, …) is a setting of its own: see docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from penstock.config import gpu_is_here, local_rank
from penstock.errors import ConfigError
from penstock.options import option, options, options_of
from penstock.settings import (
    RawSetting,
    Settings,
    each_once,
    from_source,
    load,
    read_file,
    unknown,
)
from penstock.watch.heartbeat_reader import FOLDER

SIZES = ("toy", "mini", "small", "medium", "125m")
Parallel = Literal["single", "ddp", "fsdp"]

LONGEST_S, LONGEST_ROW = 10_000_000, 1 << 20

STEPS, BATCH, LEARNING_RATE = 100, 8, 1e-3
"""Defaults if neither the command line nor a file sets them."""

DATA, MODEL, TRAINING, RUN, SAVING, FAULTS, WATCHING = (
    "Data", "Model", "Training", "Where it runs", "Checkpoints", "When data fails", "Watching",
)  # fmt: skip


@options
class TrainOptions:
    """What a run is. Every value is checked."""

    dataset: str | None = option(
        default=None,
        group=DATA,
        help="fineweb_edu, fineweb_edu_local (with --local-path), stdlib, synthetic, or an address: hf://…, s3://…, https://…, a file, a folder or a glob. Without it, what the file of --config names.",
    )
    local_path: Path | None = option(
        default=None, group=DATA, help="The file of fineweb_edu_local."
    )
    tokenizer: str = option(
        default="byte",
        group=DATA,
        help="byte, a tokenizer.json, a .tiktoken file, a Hub name such as gpt2, or stdlib: one trained on the spot.",
    )
    dataset_config: str | None = option(
        default=None,
        group=DATA,
        help="A configuration of the dataset's card on the Hub, such as sample-10BT.",
    )
    text_field: str = option(default="text", group=DATA, help="The column that has the text.")
    seq_len: int = option(
        default=256,
        minimum=8,
        group=DATA,
        help="Tokens in a row. Attention's cost grows with its square.",
    )
    packing: Literal["concat", "best_fit", "bos"] = option(
        default="concat", group=DATA, help="How documents become rows: see docs/data.md."
    )
    doc_mask: bool = option(
        default=False, group=DATA, implied="1", help="Attention within documents only."
    )
    vocab_size: int | None = option(
        default=None,
        minimum=2,
        group=DATA,
        help="How many ids there are, for files of token ids, which do not say.",
    )
    size: Literal["toy", "mini", "small", "medium", "125m"] = option(
        default="toy", group=MODEL, help=f"The model: {', '.join(SIZES)}."
    )
    dropout: float = option(
        default=0.0, minimum=0, group=MODEL, help="Share of activations dropped."
    )
    compile: bool = option(
        default=False,
        group=MODEL,
        implied="1",
        help="torch.compile, block by block. A slower start, faster steps.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        default="auto",
        group=MODEL,
        help="What is computed in. auto: bfloat16 on GPUs that have it.",
    )
    steps: int | None = option(
        default=None,
        minimum=1,
        group=TRAINING,
        help=f"Steps to run to; by default {STEPS}, or the epochs that a file asks for.",
    )
    batch: int | None = option(
        default=None,
        minimum=1,
        group=TRAINING,
        help=f"Rows of a micro-step on each rank; default {BATCH}. A file calls it batch_size.",
    )
    accumulate: int = option(
        default=1,
        minimum=1,
        group=TRAINING,
        help="Micro-steps that make a step. More cost time, not memory.",
    )
    global_batch: int | None = option(
        default=None,
        minimum=1,
        group=TRAINING,
        help="Rows of a step on all ranks; --accumulate follows, so that another number of ranks trains alike.",
    )
    lr: float | None = option(
        default=None,
        minimum=0,
        group=TRAINING,
        help=f"Highest learning rate; default {LEARNING_RATE}. A file calls it learning_rate.",
    )
    lr_warmup: int | None = option(
        default=None,
        minimum=0,
        group=TRAINING,
        help="Steps in which the rate rises; default: a tenth of them, 100 at most.",
    )
    lr_floor: float = option(
        default=0.1, minimum=0, group=TRAINING, help="What is left of it at the end of the cosine."
    )
    weight_decay: float = option(
        default=0.1, minimum=0, group=TRAINING, help="AdamW's, on matrices."
    )
    clip: float = option(
        default=1.0, minimum=0, group=TRAINING, help="Longest gradient; 0 for any."
    )
    seed: int | None = option(
        default=None,
        minimum=0,
        group=TRAINING,
        help="Of weights, dropout and the order of the data; default 0. A file has it in loader.",
    )
    eval_every: int = option(
        default=0,
        minimum=0,
        group=TRAINING,
        help="Evaluate after so many steps, on documents that training never sees; 0: never.",
    )
    eval_batches: int = option(
        default=8, minimum=1, group=TRAINING, help="Batches of an evaluation, on each rank."
    )
    val_fraction: float = option(
        default=0.005, minimum=0, group=TRAINING, help="Share of documents kept for evaluation."
    )
    prewarm: bool = option(
        default=False,
        group=TRAINING,
        implied="1",
        help="Take the cost of the first step before it, without changing a bit: see docs/prewarm.md.",
    )
    ddp: bool | None = option(
        default=None,
        none="auto",
        group=RUN,
        implied="1",
        help="1: DDP, 0: a single process. By default DDP if torchrun started several.",
    )
    fsdp: bool = option(
        default=False,
        group=RUN,
        implied="1",
        help="Shard the model (FSDP2) instead of copying it (DDP).",
    )
    device: str = option(
        default="auto",
        pattern=r"auto|cpu|cuda(:\d+)?",
        group=RUN,
        help="auto, cpu, cuda or cuda:N. auto: this rank's GPU if there is one.",
    )
    collective_timeout: float = option(
        default=600.0,
        minimum=0,
        group=RUN,
        help="Seconds that a rank waits for the others in a collective.",
    )
    out: Path = option(
        default=Path(FOLDER), group=SAVING, help="Where heartbeat, checkpoints and report go."
    )
    save_every: int = option(
        default=0,
        minimum=0,
        group=SAVING,
        help="Save after so many steps; 0: only at the end and when told to stop.",
    )
    save_last: bool = option(default=True, group=SAVING, implied="1", help="Save at the end too.")
    keep: int = option(default=3, minimum=1, group=SAVING, help="Checkpoints that stay.")
    resume: str | None = option(
        default=None,
        group=SAVING,
        implied="newest",
        help="Go on from the newest good checkpoint, or from the one that is named.",
    )
    grace: float = option(
        default=30.0,
        minimum=0,
        group=SAVING,
        help="Seconds that saving may take after SIGTERM, before the process ends anyway.",
    )
    loader_timeout: float = option(
        default=60.0,
        minimum=0,
        group=FAULTS,
        help="Seconds to wait for the vocabulary, and then for the first batch, listing included.",
    )
    stall_timeout: float = option(
        default=300.0, minimum=0, group=FAULTS, help="Seconds until any other batch."
    )
    on_stall: Literal["stop", "synthetic"] = option(
        default="stop",
        group=FAULTS,
        help="When a rank has no data: all stop, or all go on with made-up data until all have theirs again.",
    )
    synthetic_on_fail: bool = option(
        default=False, group=FAULTS, implied="1", help="The same as --on-stall synthetic."
    )
    report: str | None = option(
        default=None,
        group=WATCHING,
        implied="auto",
        help="Write the report page at the end, to this file or beside the heartbeat.",
    )
    metrics_port: int | None = option(
        default=None,
        minimum=0,
        group=WATCHING,
        help="Serve Prometheus metrics; each rank at this port plus its number on the host, 0: a free one.",
    )
    tensorboard: Path | None = option(
        default=None, group=WATCHING, help="Write TensorBoard's files here."
    )
    log_every: int = option(
        default=0,
        minimum=0,
        group=WATCHING,
        help="A line on the console every so many steps; 0: every two seconds or so.",
    )


OPTIONS = options_of(TrainOptions)


def spelled(name: str) -> str:
    """Return an option's name on the command line."""
    return name.replace("_", "-")


ELSEWHERE = {"batch": "batch_size", "lr": "learning_rate", "seed": "seed"}
"""Options that are settings of the loader too, and how those are called."""
DESCRIBED = ("tokenizer", "dataset_config", "text_field", "seq_len", "packing")
"""Options that say what the data is. Where a file's table data describes it, they would say it twice."""


def resolve(
    config: str | Path | None,
    given: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> tuple[TrainOptions, Settings]:
    """Options and the loader's settings, from the command line (`given`, `overrides`), the environment and a file."""
    said = {name: value for name, value in given.items() if value is not None}
    written_out = {spelled(name): value for name, value in said.items()}
    options = each_once(from_source(written_out, {name: name for name in OPTIONS}, "--"), OPTIONS)
    more = {name: said[option] for option, name in ELSEWHERE.items() if option in said}
    if twice := more.keys() & (overrides or {}).keys():
        raise ConfigError(
            f"--set {', '.join(sorted(twice))}: is given by an option of its own too; keep one of them"
        )
    resolved = load(
        config,
        overrides=dict(overrides or {}) | more,
        preset=preset,
        origin="command line --set ",
    )
    in_file = _from_file(resolved.file) if resolved.file is not None else {}
    written = _one_stall(in_file) | _one_stall(options)
    device = RawSetting("device", resolved["device"], resolved.sources["device"])
    over_file = "device" not in in_file or not device.where.startswith("file ")
    if device.value is not None and "device" not in options and over_file:
        written["device"] = device._replace(
            value=OPTIONS["device"].read(device.value, device.where)
        )
    made = TrainOptions(**{name: one.value for name, one in written.items()})
    _check(made, resolved)
    described = [written[name].where for name in DESCRIBED if name in written]
    if described and made.dataset is None and resolved.data is not None:
        raise ConfigError(
            f"{', '.join(described)}: {resolved.data.where} describes the data; change it there"
        )
    return made, resolved


def _one_stall(said: dict[str, RawSetting]) -> dict[str, RawSetting]:
    """One source's options, in which `on_stall` and `synthetic_on_fail` are the one option that they are."""
    stall, fail = said.get("on_stall"), said.get("synthetic_on_fail")
    if stall is None and fail is None:
        return said
    synthetic = stall.value == "synthetic" if stall is not None else bool(fail and fail.value)
    if stall is not None and fail is not None and fail.value != synthetic:
        raise ConfigError(
            f"{stall.where} = {stall.value!r} and {fail.where} = {fail.value}: are one option, and differ; keep one of them"
        )
    where = (stall or fail).where  # type: ignore[union-attr]
    stall = RawSetting("on_stall", "synthetic" if synthetic else "stop", where)
    return said | {
        "on_stall": stall,
        "synthetic_on_fail": RawSetting("synthetic_on_fail", synthetic, where),
    }


def _from_file(file: Path) -> dict[str, RawSetting]:
    found = read_file(file)
    values: dict[str, RawSetting] = {}
    for key, value in (found.table("train") or {}).items():
        where = found.where("train", key)
        if key in ELSEWHERE:
            raise ConfigError(f"{where}: in a file it is {ELSEWHERE[key]} of training")
        if key not in OPTIONS:
            raise unknown(where, key, OPTIONS)
        read = OPTIONS[key].read(value, where)
        if key in ("local_path", "tensorboard") and not read.is_absolute():
            read = file.parent / read
        values[key] = RawSetting(key, read, where)
    return values


def _check(options: TrainOptions, resolved: Settings) -> None:
    if options.dataset == "fineweb_edu_local" and options.local_path is None:
        raise ConfigError(
            "--dataset fineweb_edu_local: needs --local-path FILE; penstock bootstrap makes one"
        )
    if options.local_path is not None and options.dataset != "fineweb_edu_local":
        raise ConfigError(
            "--local-path: is for --dataset fineweb_edu_local; any other file is its own --dataset"
        )
    if options.dataset is None and resolved.data is None:
        raise ConfigError(
            "no data: give --dataset (stdlib needs nothing), or --config with a file that has a table data"
        )
    # A heartbeat that is given the name of a file goes on at its end, whatever is in it: the data itself, at worst.
    if options.out.suffix == ".jsonl" or (options.out.exists() and not options.out.is_dir()):
        raise ConfigError(f"--out {options.out}: needs a folder")
    if options.ddp is False and options.fsdp:
        raise ConfigError("--ddp 0 and --fsdp: a single process has nobody to share a model with")
    if options.global_batch is not None and options.accumulate != 1:
        raise ConfigError(
            "--global-batch and --accumulate: the one follows from the other; give one of them"
        )
    if not 0 < options.val_fraction < 1:
        raise ConfigError(f"--val-fraction {options.val_fraction:g}: needs a share between 0 and 1")
    if not options.dropout < 1:
        raise ConfigError(f"--dropout {options.dropout:g}: needs a share below 1")
    longest = max(
        options.loader_timeout, options.stall_timeout, options.collective_timeout, options.grace
    )
    if longest > LONGEST_S:
        raise ConfigError(
            f"{longest:g} seconds: no timeout may be longer than {LONGEST_S:,} seconds"
        )
    if options.seq_len > LONGEST_ROW:
        raise ConfigError(f"--seq-len {options.seq_len}: at most {LONGEST_ROW:,}")
    if options.report not in (None, "auto") and not str(options.report).endswith((".html", ".htm")):
        raise ConfigError(
            f"--report {options.report}: needs a name that ends in .html, so that it overwrites nothing else"
        )
    if (
        options.tensorboard is not None
        and options.tensorboard.exists()
        and not options.tensorboard.is_dir()
    ):
        raise ConfigError(
            f"--tensorboard {options.tensorboard}: is a file; TensorBoard wants a folder"
        )
    if options.loader_timeout <= 0 or options.stall_timeout <= 0 or options.collective_timeout <= 0:
        raise ConfigError(
            "--loader-timeout, --stall-timeout and --collective-timeout: need more than 0 seconds"
        )
    if on_stall(options) == "synthetic" and (
        not resolved["prefetch"] or resolved["n_workers"] == 0
    ):
        raise ConfigError(
            "--on-stall synthetic: needs prefetch on, and workers; without them a batch is made in the step, however long "
            "that takes"
        )


def parallel(options: TrainOptions, world: int) -> Parallel:
    """How the ranks share the work."""
    if options.ddp is False and world > 1:
        raise ConfigError(
            f"--ddp 0 with {world} processes: each would train a model of its own. Use --ddp 1 or --fsdp."
        )
    if options.fsdp:
        return "fsdp"
    return "ddp" if options.ddp or world > 1 else "single"


def device_name(options: TrainOptions) -> str | None:
    """Where batches go; None for the CPU. Without torch, which is not imported yet when the loader needs to know."""
    if options.device not in ("auto", "cuda"):
        return None if options.device == "cpu" else options.device
    return f"cuda:{local_rank()}" if options.device == "cuda" or gpu_is_here() else None


def on_stall(options: TrainOptions) -> Literal["stop", "synthetic"]:
    """What to do without data."""
    return "synthetic" if options.synthetic_on_fail or options.on_stall == "synthetic" else "stop"


def spell_out(arguments: list[str]) -> list[str]:
    """A command line in which each option that may stand alone has its value: `--resume` is `--resume newest`."""
    alone = {
        f"--{spelled(each.name)}": each.implied
        for each in OPTIONS.values()
        if each.implied is not None
    }
    result: list[str] = []
    for n, argument in enumerate(arguments):
        result.append(argument)
        follows = arguments[n + 1] if n + 1 < len(arguments) else "--"
        if argument in alone and follows.startswith("-"):
            result.append(str(alone[argument]))
    return result
