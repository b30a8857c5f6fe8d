"""A loader inside the real libraries that train: they see the loader's own stream, also after a resume."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from penstock import AsyncDataLoader, ConfigError, Shard, TextDataset
from penstock.errors import StateError
from penstock.torch_dataset import AllRanks, TorchDataset, TrainerMixin, lightning_callback
from tests.test_docs import ROOT, blocks

# What each of these libraries says of itself or of a CPU; none is about the data.
IGNORED = (
    "torch.distributed is disabled, unavailable or uninitialized:UserWarning",
    "'set_vital' is deprecated:UserWarning",
    "`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "Checkpoint directory .* exists and is not empty:UserWarning",
    "Be aware that when using `ckpt_path`, callbacks used:UserWarning",
)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{each}") for each in IGNORED]

Make = Callable[..., AsyncDataLoader]
Ids = list[list[list[int]]]
SEQ_LEN = 32
KINDS = ["endless", "text_pass", "rows_pass"]
ENDLESS = pytest.mark.parametrize("make", ["endless"], indirect=True)
PASSES = pytest.mark.parametrize("make", KINDS[1:], indirect=True)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, corpus: Path) -> Make:
    """Text without end; one pass over text, of unknown length; five batches, the last one short."""
    about: dict[str, Any] = {"batch_size": 4, "seed": 1, "n_workers": 1, "shuffle": True}
    if request.param == "rows_pass":
        samples = [{"input_ids": (np.arange(SEQ_LEN) * 7 + i) % 250} for i in range(18)]
        samples = [each | {"labels": each["input_ids"]} for each in samples]
        return partial(AsyncDataLoader, samples, epochs=1, **about)
    if request.param == "text_pass":
        source, about["epochs"], split = corpus / "docs.jsonl", 1, "val:0.05"
    else:
        source, split = corpus / "parquet", None
    data = TextDataset(source, tokenizer="byte", seq_len=SEQ_LEN, split=split)
    return partial(AsyncDataLoader, data, **about)


def ids(item: Any) -> list[list[int]]:
    out: list[list[int]] = item["input_ids"].tolist()
    return out


def take(iterable: Iterable[Any], n: int) -> Ids:
    """Return the first batches of one `for`, `n` at the most."""
    out: Ids = []
    for item in iterable if n else ():
        out.append(ids(item))
        if len(out) == n:
            break
    return out


def passes(iterable: Iterable[Any], n: int) -> Ids:
    """Return the first `n` batches, over as many passes as it takes."""
    out: Ids = []
    while len(out) < n:
        out += take(iterable, n - len(out))
    return out


def own(make: Make, n: int) -> Ids:
    """Return the loader's own first batches."""
    with make() as loader:
        return passes(loader, n)


def rows(batches: Ids) -> list[list[int]]:
    return [row for batch in batches for row in batch]


# torch.utils.data.DataLoader


@pytest.mark.parametrize("size", [1, 3, 4, None])
def test_dataloader_batches_rows_or_hands_out_finished_batches(
    make: Make, size: int | None
) -> None:
    with make() as loader:
        dataset = loader.as_torch_dataset(batched=size is None)
        seen = take(DataLoader(dataset, batch_size=size), 4)
    assert {len(batch) for batch in seen} == {size or 4}
    assert rows(seen) == rows(own(make, 4))[: 4 * (size or 4)]


@ENDLESS
@pytest.mark.parametrize("batch_size", [1, 4])
def test_finished_batches_that_are_batched_again_are_refused(make: Make, batch_size: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    for kind in (DataLoader, StatefulDataLoader):
        with make() as loader, pytest.raises(ConfigError, match="Use batch_size=None"):
            next(iter(kind(loader.as_torch_dataset(batched=True), batch_size=batch_size)))


def test_samples_that_cannot_be_cut_into_rows_need_batched() -> None:
    loader = AsyncDataLoader([(1, 2, 3)] * 8, 4)
    with loader, pytest.raises(ConfigError, match="batched=True"):
        next(iter(loader.as_torch_dataset()))


@PASSES
def test_each_for_over_a_dataloader_is_the_next_pass(make: Make) -> None:
    with make() as loader:
        n = sum(1 for _ in loader)
    with make() as loader:
        dataloader = DataLoader(loader.as_torch_dataset(), batch_size=4)
        seen = [take(dataloader, 1000) for _ in range(3)]
    assert [len(each) for each in seen] == [n, n, n]
    assert [batch for each in seen for batch in each] == own(make, 3 * n)
    assert seen[0] != seen[1]


@ENDLESS
def test_an_endless_for_that_ended_within_a_batch_loses_no_row(make: Make) -> None:
    with make() as loader:
        dataloader = DataLoader(loader.as_torch_dataset(), batch_size=3)
        seen = take(dataloader, 1) + take(dataloader, 3)
    assert rows(seen) == rows(own(make, 3))


def test_length_is_given_where_it_is_known(make: Make) -> None:
    dataset, batches = make().as_torch_dataset(), make().as_torch_dataset(batched=True)
    if isinstance(make.args[0], list):  # type: ignore[attr-defined]
        assert len(DataLoader(dataset, batch_size=3)) == 6
        assert len(DataLoader(batches, batch_size=None)) == 5
    else:
        with pytest.raises(TypeError, match="has no len"):
            len(DataLoader(dataset, batch_size=4))


@ENDLESS
def test_workers_of_a_dataloader_are_refused(make: Make) -> None:
    dataset = make().as_torch_dataset()
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn")))


# State


@pytest.mark.parametrize("k", [0, 1, 4, 7, 16])
def test_state_of_a_dataset_restores_the_rest(make: Make, k: int) -> None:
    whole = rows(own(make, 6))[:22]

    def resumed(saved: Any, n: int, **how: Any) -> Any:
        with make(**how) as loader:
            dataset = loader.as_torch_dataset()
            dataset.load_state_dict(json.loads(json.dumps(saved)))
            assert dataset.state_dict() == saved
            return passes(dataset, n), dataset.state_dict()

    with make() as loader:
        dataset = loader.as_torch_dataset()
        first, saved = take(dataset, k), dataset.state_dict()
    second, later = resumed(saved, 1)
    assert first + second + resumed(later, 21 - k)[0] == whole
    if k % 4:  # in the middle of a batch: smaller batches of the loader continue there, too
        assert resumed(saved, 18 - k, batch_size=2)[0] == whole[k:18]


def test_rows_continue_on_another_number_of_ranks(corpus: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=SEQ_LEN)

    def dataset(world: int, rank: int) -> TorchDataset:
        how: Any = {"shard": Shard(world, rank), "lanes": 2, "shuffle": True, "n_workers": 1}
        return AsyncDataLoader(data, 8 // world, **how).as_torch_dataset()

    one, two = dataset(1, 0), [dataset(2, rank) for rank in range(2)]
    whole = take(dataset(1, 0), 24)
    seen = zip(*(take(each, 5) for each in two), strict=True)
    assert [row for pair in seen for row in pair] == whole[:10]
    with pytest.raises(StateError, match="Load the states of all ranks"):
        two[1].load_state_dict(two[0].state_dict())
    states = json.dumps([json.loads(each.state_dict()["loader"]) for each in two])
    one.load_state_dict({"loader": states, "rows": two[0].state_dict()["rows"]})
    assert take(one, 14) == whole[10:]
    with pytest.raises(StateError, match="3 rows into a batch"):
        two[0].load_state_dict({"loader": states, "rows": 3})
    for each in (one, *two):
        each.loader.shutdown()


@ENDLESS
@pytest.mark.parametrize("state", [{"loader": "{"}, {"loader": "{}"}, {"loader": 3}, {}])
def test_anything_but_a_state_is_refused(make: Make, state: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        make().as_torch_dataset().load_state_dict(state)


@pytest.mark.parametrize("batch_size", [None, 3, 4])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_stateful_dataloader_resumes_exactly(make: Make, k: int, batch_size: int | None) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def dataloader(loader: AsyncDataLoader) -> Any:
        dataset = loader.as_torch_dataset(batched=batch_size is None)
        return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=0)

    with make() as loader:
        whole = passes(dataloader(loader), 9)
    with make() as loader:
        stream = dataloader(loader)
        seen = take(stream, k)
        saved = pickle.loads(pickle.dumps(stream.state_dict()))
    with make() as loader:
        stream = dataloader(loader)
        stream.load_state_dict(saved)
        assert seen + passes(stream, 9 - k) == whole


@pytest.mark.parametrize("form", [lambda it: it, AsyncDataLoader.as_torch_dataset, AllRanks])
def test_distributed_checkpoint_gives_the_state_back_as_it_was(
    make: Make, form: Callable[[AsyncDataLoader], Any], tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    with make() as loader:
        take(loader, 3)
        saved = loader.state_dict()
        assert isinstance(form(loader), Stateful)
        dcp.save({"stream": form(loader)}, checkpoint_id=tmp_path / "step")
    with make() as loader:
        dcp.load({"stream": form(loader)}, checkpoint_id=tmp_path / "step")
        assert loader.state_dict() == saved
        assert take(loader, 2) == own(make, 5)[3:]


# transformers


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=SEQ_LEN, n_embd=8, n_layer=1, n_head=1)
    return GPT2LMHeadModel(config)


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Trains a tiny GPT-2 and returns its Trainer: `seen` are the ids that it was trained on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= (
                args.save_strategy == "steps" and state.global_step == args.save_steps
            )

    class Plain(Trainer):  # type: ignore[misc]
        seen: Ids

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(ids(inputs))
            return super().training_step(model, inputs, *args, **kwargs)

    class Mixed(TrainerMixin, Plain):
        pass

    def train(
        loader: AsyncDataLoader, stop: int = 0, resume: Any = None, mixin: bool = True,
        batched: bool = False, **settings: Any,
    ) -> Any:  # fmt: skip
        args = TrainingArguments(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], disable_tqdm=True,
            logging_strategy="no", save_strategy="steps" if stop else "no", save_steps=stop or 500,
            per_device_train_batch_size=4, **settings,
        )  # fmt: skip
        dataset = loader.as_torch_dataset(batched=batched)
        kind = Mixed if mixin else Plain
        trainer = kind(gpt2(), args, train_dataset=dataset, callbacks=[Stop()])
        trainer.remove_callback(PrinterCallback)
        trainer.seen, trainer.checkpoint = [], str(tmp_path / "run" / f"checkpoint-{stop}")
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


@ENDLESS
@pytest.mark.slow
def test_a_model_of_transformers_learns_the_next_id(make: Make) -> None:
    with make() as loader:
        batch = next(loader)
        collated = next(iter(DataLoader(loader.as_torch_dataset(), batch_size=4)))
    assert torch.equal(collated["labels"][:, 1:], collated["input_ids"][:, 1:])
    out = gpt2().eval()(**batch)
    # The model shifts the labels: its loss is that of the targets, without the last of each row.
    expected = cross_entropy(out.logits[:, :-1].flatten(0, 1), batch.targets[:, :-1].flatten())
    assert torch.allclose(out.loss, expected)


@ENDLESS
@pytest.mark.slow
@pytest.mark.parametrize("mixin", [True, False])
def test_transformers_trainer_finds_the_last_checkpoint_and_evaluates(
    make: Make, mixin: bool, hf: Callable[..., Any]
) -> None:
    how = {"mixin": mixin, "batched": mixin, "max_steps": 4}  # a plain Trainer needs rows
    with make() as loader:
        hf(loader, 2, **how)
    with make() as loader, make(epochs=1, shuffle=False) as val:
        trainer = hf(loader, resume=True, **how)
        assert trainer.seen == own(make, 4)[2:]
        losses = [trainer.evaluate(val.as_torch_dataset())["eval_loss"] for _ in range(2)]
        assert losses[0] == pytest.approx(losses[1])


# Lightning


@pytest.fixture
def lightning(tmp_path: Path) -> Callable[..., Any]:
    """Trains a tiny model and returns it: `seen` are the ids that it was trained on."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: Ids = []
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Embedding(257, 4), torch.nn.Linear(4, 257))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(ids(batch))
            return cross_entropy(
                self.net(batch["input_ids"]).flatten(0, 1), batch.targets.flatten()
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(loader: AsyncDataLoader, stop: int = 0, resume: Any = None, **how: Any) -> Any:
        save = pl.callbacks.ModelCheckpoint(
            tmp_path, filename="{step}", every_n_train_steps=stop or 1000, save_top_k=-1
        )
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[lightning_callback(loader), save],
            **how | ({"max_steps": stop, "max_epochs": None} if stop else {}),
        )  # fmt: skip
        module = Module()
        trainer.fit(module, loader, ckpt_path=resume)
        module.model, module.checkpoint = module.net, tmp_path / f"step={stop}.ckpt"
        return module

    return fit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "make", "how", "stop"),
    [
        ("hf", "endless", {"max_steps": 6, "gradient_accumulation_steps": 2}, 3),
        ("hf", "text_pass", {"max_steps": 12}, 4),
        ("hf", "rows_pass", {"num_train_epochs": 2}, 3),
        ("hf", "rows_pass", {"num_train_epochs": 2}, 5),  # at the end of a pass
        ("hf", "rows_pass", {"num_train_epochs": 2}, 7),
        ("lightning", "endless", {"max_steps": 6}, 3),  # no length: Lightning fetches ahead
        ("lightning", "endless", {"max_steps": 6, "accumulate_grad_batches": 2}, 3),
        ("lightning", "endless", {"max_epochs": 2, "limit_train_batches": 3}, 2),
        ("lightning", "endless", {"max_epochs": 2, "limit_train_batches": 3}, 3),
        ("lightning", "text_pass", {"max_epochs": 2}, 4),
        ("lightning", "rows_pass", {"max_epochs": 2}, 3),
        ("lightning", "rows_pass", {"max_epochs": 2}, 5),  # at the end of a pass
        ("lightning", "rows_pass", {"max_epochs": 2}, 7),
    ],
    indirect=["make"],
)
def test_a_trainer_sees_the_loaders_batches_and_resumes_exactly(
    library: str, make: Make, how: dict[str, Any], stop: int, request: pytest.FixtureRequest
) -> None:
    train = request.getfixturevalue(library)
    with make() as loader:
        whole = train(loader, **how)
    with make() as loader:
        first = train(loader, stop, **how)
    with make() as loader:
        second = train(loader, resume=first.checkpoint, **how)
    assert whole.seen == own(make, len(whole.seen))
    assert first.seen + second.seen == whole.seen
    weights = (each.model.parameters() for each in (second, whole))
    assert all(map(torch.equal, *weights))


# Accelerate


@pytest.mark.slow
def test_accelerate_prepares_the_loader_itself_and_resumes_exactly(
    make: Make, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    def run(loader: AsyncDataLoader, n: int, load: bool) -> Ids:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(loader)
        accelerator.register_for_checkpointing(AllRanks(loader))
        if load:
            accelerator.load_state(str(tmp_path))
        seen = take((item.to(accelerator.device) for item in loader), n)
        accelerator.save_state(str(tmp_path))
        accelerator.free_memory()
        return seen

    with make() as loader:
        seen = run(loader, 3, load=False)
    with make() as loader:
        seen += run(loader, 2, load=True)
    assert seen == own(make, 5)


# Libraries that the tests use if they are installed. Each recipe of the page runs as a script.

TRL = """
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from itertools import islice

collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
with AsyncDataLoader(data, batch_size=4, shuffle=True, seed=1) as loader:
    for step in range(4):
        collated, batch = collate([*islice(rows(), 4 * step, 4 * step + 4)]), next(loader)
        assert collated["input_ids"].flatten().equal(batch.inputs.flatten())
        assert collated["position_ids"].flatten().equal(batch.positions.flatten())
        assert collated["cu_seq_lens_q"].equal(batch.cu_seqlens)
        assert collated["max_length_q"] == batch.max_seqlen
        assert trained[step].flatten().equal(batch.inputs.flatten())
"""
TRL_RECORD = """
trained = []
class SFTTrainer(SFTTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        trained.append(inputs["input_ids"].clone())
        return super().training_step(model, inputs, *args, **kwargs)
"""
TORCHTITAN = """
import torch.distributed.checkpoint as dcp

def build():  # as torchtitan's Trainer does
    return PenstockDataLoader.Config(dataset_path="corpus").build(
        dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=64, local_batch_size=4,
        snapshot_every_n_steps=2,
    )

first, second = build(), build()
batches = iter(first)
next(batches)
dcp.save({"dataloader": first}, checkpoint_id="step-1")
inputs, labels = next(batches)
dcp.load({"dataloader": second}, checkpoint_id="step-1")
again, _ = next(iter(second))
assert inputs["input"].shape == labels.shape == (4, 64)
assert inputs["input"][:, 1:].equal(labels[:, :-1])
assert again["input"].equal(inputs["input"]) and again["positions"].equal(inputs["positions"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["trl", "torchtitan"])
def test_the_recipe_of_a_library_runs(library: str, corpus: Path, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    mark = f"run if installed: {library}"
    (recipe,) = (b.text for b in blocks(ROOT / "docs/integrations.md", "python") if b.mark == mark)
    if library == "trl":
        begin = recipe.index("\ndef train(")
        script = recipe[:begin] + TRL_RECORD + recipe[begin:] + TRL
    else:
        script = recipe + TORCHTITAN
    (tmp_path / "corpus").symlink_to(corpus / "parquet")
    (tmp_path / "tokenizer.json").symlink_to(corpus / "tokenizer.json")
    (tmp_path / "script.py").write_text(script)
    line = [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
