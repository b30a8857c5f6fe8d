"""The options of the showcase trainer: what a run is.

In:    the command line, and the table `train` of a configuration file.
Out:   `TrainOptions`, checked, and the loader's settings beside them.
Where: the trainer's thread, before anything else.
State: none.

One table: the command line, the file and the documentation are made of the fields below. What belongs to the loader
(workers, prefetch, warmup, …) is a setting of its own: see docs/configuration.md.
"""

# ruff: noqa: RUF009  (`_option` is `dataclasses.field` by another name)

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.config import gpu_is_here, local_rank
from penstock.dialects import each_once, from_options, read_file, unknown
from penstock.errors import ConfigError
from penstock.settings import Resolved, load
from penstock.values import Kind, Said, choice, flag, number, or_none, refuse, whole
from penstock.watch.heartbeat_reader import FOLDER

T = TypeVar("T")

SIZES = ("toy", "mini", "small", "medium", "125m")
Parallel = Literal["single", "ddp", "fsdp"]

LONGEST_S, LONGEST_ROW = 10_000_000, 1 << 20

STEPS, BATCH, LEARNING_RATE = 100, 8, 1e-3
"""Where neither the command line nor a file says."""


def text() -> Kind:
    """Any text but an empty one."""
    return Kind("a text", lambda value: value if isinstance(value, str) and value else refuse())


def maybe(kind: Kind) -> Kind:
    """A kind that may be left out; no word stands for that, because any word might be a name."""
    return Kind(kind.needs, lambda value: None if value is None else kind.read(value))


def path() -> Kind:
    """A file or folder."""
    return Kind("a path", lambda value: Path(value).expanduser())


def _device() -> Kind:
    """Where a model may be."""

    def read(value: Any) -> str:
        return (
            value
            if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", value)
            else refuse()
        )

    return Kind("auto, cpu, cuda or cuda:N", read)


def _option(default: T, kind: Kind, help: str, group: str, *, implied: str | None = None) -> T:
    made: T = field(
        default=default, metadata={"kind": kind, "help": help, "group": group, "implied": implied}
    )
    return made


DATA, MODEL, TRAINING, RUN, SAVING, FAULTS, WATCHING = (
    "Data", "Model", "Training", "Where it runs", "Checkpoints", "When data fails", "Watching",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run is. Every value is checked, and may be given as text."""

    dataset: str | None = _option(
        None, maybe(text()), "fineweb_edu, fineweb_edu_local (with --local-path), stdlib, synthetic, or an address: "
        "hf://…, s3://…, https://…, a file, a folder or a glob. Without it, what the file of --config names.", DATA,
    )  # fmt: skip
    local_path: Path | None = _option(None, maybe(path()), "The file of fineweb_edu_local.", DATA)
    tokenizer: str = _option(
        "byte",
        text(),
        "byte, a tokenizer.json, a .tiktoken file, a Hub name such as gpt2, or stdlib: one trained on the spot.",
        DATA,
    )
    dataset_config: str | None = _option(
        None,
        maybe(text()),
        "A configuration of the dataset's card on the Hub, such as sample-10BT.",
        DATA,
    )
    text_field: str = _option("text", text(), "The column that has the text.", DATA)
    seq_len: int = _option(
        256, whole(8), "Tokens in a row. Attention's cost grows with its square.", DATA
    )
    packing: str = _option(
        "concat",
        choice("concat", "best_fit", "bos"),
        "How documents become rows: see docs/data.md.",
        DATA,
    )
    doc_mask: bool = _option(False, flag(), "Attention within documents only.", DATA, implied="1")

    vocab_size: int | None = _option(
        None,
        or_none(whole(2)),
        "How many ids there are, for files of token ids, which do not say.",
        DATA,
    )

    size: str = _option("toy", choice(*SIZES), f"The model: {', '.join(SIZES)}.", MODEL)
    dropout: float = _option(0.0, number(), "Share of activations dropped.", MODEL)
    compile: bool = _option(
        False,
        flag(),
        "torch.compile, block by block. A slower start, faster steps.",
        MODEL,
        implied="1",
    )
    dtype: str = _option(
        "auto",
        choice("auto", "float32", "bfloat16"),
        "What is computed in. auto: bfloat16 on GPUs that have it.",
        MODEL,
    )

    steps: int | None = _option(
        None,
        or_none(whole(1)),
        f"Steps to run to; by default {STEPS}, or the epochs that a file asks for.",
        TRAINING,
    )
    batch: int | None = _option(
        None,
        or_none(whole(1)),
        f"Rows of a micro-step on each rank; default {BATCH}. A file calls it batch_size.",
        TRAINING,
    )
    accumulate: int = _option(
        1, whole(1), "Micro-steps that make a step. More cost time, not memory.", TRAINING
    )
    global_batch: int | None = _option(
        None, or_none(whole(1)), "Rows of a step on all ranks; --accumulate follows, so that another number of ranks "
        "trains alike.", TRAINING,
    )  # fmt: skip
    lr: float | None = _option(
        None,
        or_none(number()),
        f"Highest learning rate; default {LEARNING_RATE}. A file calls it learning_rate.",
        TRAINING,
    )
    lr_warmup: int | None = _option(
        None,
        or_none(whole(0)),
        "Steps in which the rate rises; default: a tenth of them, 100 at most.",
        TRAINING,
    )
    lr_floor: float = _option(
        0.1, number(), "What is left of it at the end of the cosine.", TRAINING
    )
    weight_decay: float = _option(0.1, number(), "AdamW's, on matrices.", TRAINING)
    clip: float = _option(1.0, number(), "Longest gradient; 0 for any.", TRAINING)
    seed: int | None = _option(
        None,
        or_none(whole(0)),
        "Of weights, dropout and the order of the data; default 0. A file has it in loader.",
        TRAINING,
    )
    eval_every: int = _option(
        0,
        whole(0),
        "Evaluate after so many steps, on documents that training never sees; 0: never.",
        TRAINING,
    )
    eval_batches: int = _option(8, whole(1), "Batches of an evaluation, on each rank.", TRAINING)
    val_fraction: float = _option(
        0.005, number(), "Share of documents kept for evaluation.", TRAINING
    )
    prewarm: bool = _option(
        False, flag(), "Take the cost of the first step before it, without changing a bit: see docs/prewarm.md.",
        TRAINING, implied="1",
    )  # fmt: skip

    ddp: bool | None = _option(
        None,
        or_none(flag(), "auto"),
        "1: DDP, 0: a single process. By default DDP if torchrun started several.",
        RUN,
        implied="1",
    )
    fsdp: bool = _option(
        False, flag(), "Shard the model (FSDP2) instead of copying it (DDP).", RUN, implied="1"
    )
    device: str = _option(
        "auto", _device(), "auto, cpu, cuda or cuda:N. auto: this rank's GPU if there is one.", RUN
    )
    collective_timeout: float = _option(
        600.0, number("seconds"), "Seconds that a rank waits for the others in a collective.", RUN
    )

    out: Path = _option(Path(FOLDER), path(), "Where heartbeat, checkpoints and report go.", SAVING)
    save_every: int = _option(
        0, whole(0), "Save after so many steps; 0: only at the end and when told to stop.", SAVING
    )
    save_last: bool = _option(True, flag(), "Save at the end too.", SAVING, implied="1")
    keep: int = _option(3, whole(1), "Checkpoints that stay.", SAVING)
    resume: str | None = _option(
        None,
        maybe(text()),
        "Go on from the newest good checkpoint, or from the one that is named.",
        SAVING,
        implied="newest",
    )
    grace: float = _option(
        30.0,
        number("seconds"),
        "Seconds that saving may take after SIGTERM, before the process ends anyway.",
        SAVING,
    )

    loader_timeout: float = _option(
        60.0,
        number("seconds"),
        "Seconds to wait for the vocabulary, and then for the first batch, listing included.",
        FAULTS,
    )
    stall_timeout: float = _option(
        300.0, number("seconds"), "Seconds until any other batch.", FAULTS
    )
    on_stall: str = _option(
        "stop", choice("stop", "synthetic"), "When a rank has no data: all stop, or all go on with made-up data until all "
        "have theirs again.", FAULTS,
    )  # fmt: skip
    synthetic_on_fail: bool = _option(
        False, flag(), "The same as --on-stall synthetic.", FAULTS, implied="1"
    )

    report: str | None = _option(
        None, maybe(text()), "Write the report page at the end, to this file or beside the heartbeat.",
        WATCHING, implied="auto",
    )  # fmt: skip
    metrics_port: int | None = _option(
        None,
        or_none(whole(0)),
        "Serve Prometheus metrics; each rank at this port plus its number on the host, 0: a free one.",
        WATCHING,
    )
    tensorboard: Path | None = _option(
        None, maybe(path()), "Write TensorBoard's files here.", WATCHING
    )
    log_every: int = _option(
        0,
        whole(0),
        "A line on the console every so many steps; 0: every two seconds or so.",
        WATCHING,
    )

    def __post_init__(self) -> None:
        for name, each in OPTIONS.items():
            object.__setattr__(
                self, name, each.kind.parse(Said(name, getattr(self, name), f"--{each.spelled}"))
            )


@dataclass(frozen=True, slots=True)
class Option:
    """One of them, as the command line shows it."""

    name: str
    kind: Kind
    help: str
    group: str
    implied: str | None
    """What it means without a value; None if it needs one."""
    default: Any

    @property
    def spelled(self) -> str:
        return self.name.replace("_", "-")


OPTIONS: dict[str, Option] = {
    each.name: Option(
        each.name, each.metadata["kind"], each.metadata["help"], each.metadata["group"], each.metadata["implied"], each.default
    )
    for each in fields(TrainOptions)
}  # fmt: skip


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
) -> tuple[TrainOptions, Resolved]:
    """Options and the loader's settings, from the command line (`given`, `overrides`), the environment and a file."""
    said = {name: value for name, value in given.items() if value is not None}
    spelled = {
        OPTIONS[name].spelled if name in OPTIONS else name: value for name, value in said.items()
    }
    options = each_once(
        from_options(spelled, OPTIONS, "--{}"), {name: each.kind for name, each in OPTIONS.items()}
    )
    more = {name: said[option] for option, name in ELSEWHERE.items() if option in said}
    if twice := more.keys() & (overrides or {}).keys():
        raise ConfigError(
            f"--set {', '.join(sorted(twice))}: is given by an option of its own too; keep one of them"
        )
    resolved = load(
        config,
        overrides=dict(overrides or {}) | more,
        preset=preset,
        origin="command line --set {}",
    )
    in_file = _from_file(resolved.file) if resolved.file is not None else {}
    written = _one_stall(in_file) | _one_stall(options)
    device = Said("device", resolved.settings.device, resolved.sources["device"])
    over_file = "device" not in in_file or not device.where.startswith("file ")
    if device.value is not None and "device" not in options and over_file:
        written["device"] = device._replace(value=OPTIONS["device"].kind.parse(device))
    made = TrainOptions(**{name: one.value for name, one in written.items()})
    _check(made, resolved)
    described = [written[name].where for name in DESCRIBED if name in written]
    if described and made.dataset is None and resolved.data is not None:
        raise ConfigError(
            f"{', '.join(described)}: {resolved.data.where} describes the data; change it there"
        )
    return made, resolved


def _one_stall(said: dict[str, Said]) -> dict[str, Said]:
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
    stall = Said("on_stall", "synthetic" if synthetic else "stop", where)
    return said | {
        "on_stall": stall,
        "synthetic_on_fail": Said("synthetic_on_fail", synthetic, where),
    }


def _from_file(file: Path) -> dict[str, Said]:
    found = read_file(file)
    values: dict[str, Said] = {}
    for key, value in (found.table("train") or {}).items():
        where = found.where("train", key)
        if key in ELSEWHERE:
            raise ConfigError(f"{where}: in a file it is {ELSEWHERE[key]} of training")
        if key not in OPTIONS:
            raise unknown(where, key, OPTIONS)
        read = OPTIONS[key].kind.parse(Said(key, value, where))
        if key in ("local_path", "tensorboard") and not read.is_absolute():
            read = file.parent / read
        values[key] = Said(key, read, where)
    return values


def _check(options: TrainOptions, resolved: Resolved) -> None:
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
    if resolved.settings.output == "numpy":
        raise ConfigError(
            f"{resolved.sources['output']} = 'numpy': a model is trained on tensors; leave it out"
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
        not resolved.settings.prefetch or resolved.settings.n_workers == 0
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
        f"--{each.spelled}": each.implied for each in OPTIONS.values() if each.implied is not None
    }
    spelled: list[str] = []
    for n, argument in enumerate(arguments):
        spelled.append(argument)
        follows = arguments[n + 1] if n + 1 < len(arguments) else "--"
        if argument in alone and follows.startswith("-"):
            spelled.append(str(alone[argument]))
    return spelled
