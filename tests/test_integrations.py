"""A loader inside the real libraries that train: they see the loader's own stream, also after a resume."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from penstock import AsyncDataLoader, ConfigError, Shard, TextDataset
from penstock.errors import StateError
from penstock.torch_dataset import AllRanks, TorchDataset, TrainerMixin, lightning_callback

pytestmark = [
    # What each of these libraries says of itself or of a CPU; none is about the data.
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Checkpoint directory .* exists and is not empty:UserWarning"
    ),
]

Make = Callable[..., AsyncDataLoader]
Ids = list[list[list[int]]]

SEQ_LEN = 32


class Rows:
    """Samples that can be addressed, so that the length of a pass is known."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = (np.arange(SEQ_LEN) * 7 + i) % 250
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def endless(corpus: Path) -> Make:
    """Text without end: no length."""
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=SEQ_LEN)
    return partial(AsyncDataLoader, data, batch_size=4, shuffle=True, seed=1, n_workers=1)


@pytest.fixture
def text_pass(corpus: Path) -> Make:
    """One pass over text: finite, but nobody knows the length beforehand."""
    data = TextDataset(corpus / "docs.jsonl", tokenizer="byte", seq_len=SEQ_LEN, split="val:0.05")
    return partial(AsyncDataLoader, data, batch_size=4, shuffle=True, seed=1, n_workers=1, epochs=1)


@pytest.fixture
def rows_pass() -> Make:
    """One pass of known length: five batches, the last one short."""
    return partial(AsyncDataLoader, Rows(18), batch_size=4, seed=1, n_workers=1, epochs=1)


@pytest.fixture(params=["endless", "text_pass", "rows_pass"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.getfixturevalue(request.param)
    return made


def ids(item: Any) -> list[list[int]]:
    out: list[list[int]] = item["input_ids"].tolist()
    return out


def own(make: Make, n: int) -> Ids:
    """The loader's own first batches, over as many passes as it takes."""
    out: Ids = []
    with make() as loader:
        while len(out) < n:
            for batch in loader:
                out.append(np.asarray(batch["input_ids"]).tolist())
                if len(out) == n:
                    break
    return out


def take(iterable: Iterable[Any], n: int) -> Ids:
    """What the first batches of one `for` are, `n` at the most."""
    out: Ids = []
    for item in iterable:
        out.append(ids(item))
        if len(out) == n:
            break
    return out


def length_of_pass(make: Make) -> int:
    with make() as loader:
        return sum(1 for _ in loader)


def rows(batches: Ids) -> list[list[int]]:
    return [row for batch in batches for row in batch]


# torch.utils.data.DataLoader


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_dataloader_batches_the_loaders_rows(make: Make, batch_size: int) -> None:
    with make() as loader:
        seen = take(DataLoader(loader.as_torch_dataset(), batch_size=batch_size), 4)
    assert {len(batch) for batch in seen} == {batch_size}
    assert rows(seen) == rows(own(make, 4))[: 4 * batch_size]


def test_dataloader_hands_out_finished_batches(make: Make) -> None:
    with make() as loader:
        seen = take(DataLoader(loader.as_torch_dataset(batched=True), batch_size=None), 5)
    assert seen == own(make, 5)


def test_samples_that_cannot_be_cut_into_rows_need_batched() -> None:
    loader = AsyncDataLoader([(1, 2, 3)] * 8, 4)
    with loader, pytest.raises(ConfigError, match="batched=True"):
        next(iter(loader.as_torch_dataset()))


@pytest.mark.parametrize("name", ["text_pass", "rows_pass"])
def test_each_for_over_a_dataloader_is_the_next_pass(
    name: str, request: pytest.FixtureRequest
) -> None:
    make: Make = request.getfixturevalue(name)
    n = length_of_pass(make)
    with make() as loader:
        dataloader = DataLoader(loader.as_torch_dataset(), batch_size=4)
        passes = [take(dataloader, 1000) for _ in range(3)]
    assert [len(p) for p in passes] == [n, n, n]
    assert [batch for p in passes for batch in p] == own(make, 3 * n)
    assert passes[0] != passes[1]


def test_an_endless_for_that_ended_within_a_batch_loses_no_row(endless: Make) -> None:
    with endless() as loader:
        dataloader = DataLoader(loader.as_torch_dataset(), batch_size=3)
        seen = take(dataloader, 1) + take(dataloader, 3)
    assert rows(seen) == rows(own(endless, 3))


def test_length_is_given_where_it_is_known_and_a_type_error_elsewhere(
    endless: Make, text_pass: Make, rows_pass: Make
) -> None:
    assert len(DataLoader(rows_pass().as_torch_dataset(), batch_size=3)) == 6
    assert len(DataLoader(rows_pass().as_torch_dataset(batched=True), batch_size=None)) == 5
    for make in (endless, text_pass):
        with pytest.raises(TypeError, match="has no len"):
            len(DataLoader(make().as_torch_dataset(), batch_size=4))


def test_workers_of_a_dataloader_are_refused(endless: Make) -> None:
    dataset = endless().as_torch_dataset()
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
            got: Any = []
            while len(got) < n:
                got += take(dataset, n - len(got))
            return got, dataset.state_dict()

    with make() as loader:
        dataset = loader.as_torch_dataset()
        first = take(dataset, k) if k else []
        saved = dataset.state_dict()
    second, later = resumed(saved, 1)
    assert first + second + resumed(later, 21 - k)[0] == whole
    if k % 4:  # in the middle of a batch: smaller batches of the loader continue there, too
        assert resumed(saved, 18 - k, batch_size=2)[0] == whole[k:18]


def test_rows_continue_on_another_number_of_ranks(corpus: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=SEQ_LEN)

    def dataset(world: int, rank: int) -> TorchDataset:
        how: Any = {"shard": Shard(world, rank), "lanes": 2, "shuffle": True, "n_workers": 1}
        return AsyncDataLoader(data, 8 // world, **how).as_torch_dataset()

    whole = take(dataset(1, 0), 24)
    two = [dataset(2, rank) for rank in range(2)]
    assert [row for pair in zip(*(take(each, 5) for each in two), strict=True) for row in pair] == (
        whole[:10]
    )
    states = [json.loads(each.state_dict()["loader"]) for each in two]
    one = dataset(1, 0)
    one.load_state_dict({"loader": json.dumps(states), "rows": two[0].state_dict()["rows"]})
    assert take(one, 14) == whole[10:]
    with pytest.raises(StateError, match="3 rows into a batch"):
        two[0].load_state_dict({"loader": json.dumps(states), "rows": 3})
    for each in (one, *two):
        each.loader.shutdown()


def test_a_state_that_is_none_is_refused(endless: Make) -> None:
    dataset = endless().as_torch_dataset()
    for state in (
        {"loader": "{"},
        {"loader": "{}"},
        {"loader": 3},
        {},
    ):
        with pytest.raises(StateError):
            dataset.load_state_dict(state)


# torchdata


@pytest.mark.parametrize("batch_size", [None, 3, 4])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_stateful_dataloader_resumes_exactly(make: Make, k: int, batch_size: int | None) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def dataloader(loader: AsyncDataLoader) -> Any:
        dataset = loader.as_torch_dataset(batched=batch_size is None)
        return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=0)

    def passes(stream: Any, seen: Ids) -> Ids:
        while len(seen) < 9:
            seen += take(stream, 9 - len(seen))
        return seen

    with make() as loader:
        whole = passes(dataloader(loader), [])
    with make() as loader:
        stream = dataloader(loader)
        seen = take(stream, k) if k else []
        saved = pickle.loads(pickle.dumps(stream.state_dict()))
    with make() as loader:
        stream = dataloader(loader)
        stream.load_state_dict(saved)
        assert passes(stream, seen) == whole


# torch.distributed.checkpoint


def test_loader_and_dataset_are_stateful(endless: Make) -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    loader = endless()
    assert isinstance(loader, Stateful)
    assert isinstance(loader.as_torch_dataset(), Stateful)
    assert isinstance(AllRanks(loader), Stateful)


def whole(loader: AsyncDataLoader) -> Any:
    return loader


def as_dataset(loader: AsyncDataLoader) -> Any:
    return loader.as_torch_dataset()


def as_all_ranks(loader: AsyncDataLoader) -> Any:
    return AllRanks(loader)


@pytest.mark.parametrize("form", [whole, as_dataset, as_all_ranks])
def test_distributed_checkpoint_gives_the_state_back_as_it_was(
    make: Make, form: Callable[[AsyncDataLoader], Any], tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    with make() as loader:
        take(loader, 3)
        saved = loader.state_dict()
        dcp.save({"stream": form(loader)}, checkpoint_id=tmp_path / "step")
    with make() as loader:
        dcp.load({"stream": form(loader)}, checkpoint_id=tmp_path / "step")
        assert loader.state_dict() == saved
        assert take(loader, 2) == own(make, 5)[3:]


# transformers


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Makes a Trainer of a tiny GPT-2 that writes down the ids it trains on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def __init__(self, at: int | None) -> None:
            self.at = at

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == self.at

    class Plain(Trainer):  # type: ignore[misc]
        seen: Ids

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(ids(inputs))
            return super().training_step(model, inputs, *args, **kwargs)

    class Mixed(TrainerMixin, Plain):
        pass

    def make(
        loader: AsyncDataLoader,
        stop: int | None = None,
        plain: bool = False,
        batched: bool = False,
        **more: Any,
    ) -> Any:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=257, n_positions=SEQ_LEN, n_embd=8, n_layer=1, n_head=1)
        settings: dict[str, Any] = {"save_strategy": "no", "per_device_train_batch_size": 4} | more
        if stop is not None:
            settings |= {"save_strategy": "steps", "save_steps": stop}
        args = TrainingArguments(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
            **settings,
        )  # fmt: skip
        dataset = loader.as_torch_dataset(batched=batched)
        kind = Plain if plain else Mixed
        trainer = kind(GPT2LMHeadModel(config), args, train_dataset=dataset, callbacks=[Stop(stop)])
        trainer.remove_callback(PrinterCallback)
        trainer.seen = []
        return trainer

    return make


@pytest.mark.slow
def test_a_model_of_transformers_learns_the_next_id(endless: Make) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=257, n_positions=SEQ_LEN, n_embd=8, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config).eval()
    with endless() as loader:
        batch = next(loader)
        collated = next(iter(DataLoader(loader.as_torch_dataset(), batch_size=4)))
    assert torch.equal(collated["labels"][:, 1:], collated["input_ids"][:, 1:])
    out = model(**batch)
    # The model shifts the labels: its loss is that of the targets, without the last of each row.
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), batch.targets[:, :-1].flatten()
    )
    assert torch.allclose(out.loss, expected)


def weights(trainer: Any) -> list[float]:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "stop"),
    [
        ("endless", {"max_steps": 6, "gradient_accumulation_steps": 2}, 3),
        ("text_pass", {"max_steps": 12}, 4),
        ("rows_pass", {"num_train_epochs": 2}, 3),
        ("rows_pass", {"num_train_epochs": 2}, 5),  # at the end of a pass
        ("rows_pass", {"num_train_epochs": 2}, 7),
    ],
)
def test_transformers_trainer_sees_the_loaders_batches_and_resumes_exactly(
    name: str,
    how: dict[str, Any],
    stop: int,
    hf: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    make: Make = request.getfixturevalue(name)
    with make() as loader:
        uninterrupted = hf(loader, **how)
        uninterrupted.train()
    steps = uninterrupted.state.global_step
    assert uninterrupted.seen == own(make, steps * how.get("gradient_accumulation_steps", 1))

    with make() as loader:
        first = hf(loader, stop, **how)
        first.train()
    with make() as loader:
        second = hf(loader, **how)
        second.train(resume_from_checkpoint=str(Path(first.args.output_dir) / f"checkpoint-{stop}"))
    assert second.state.global_step == steps
    assert first.seen + second.seen == uninterrupted.seen
    assert weights(second) == weights(uninterrupted)


@pytest.mark.slow
def test_a_plain_trainer_trains_on_rows_and_resumes_by_reading_again(
    endless: Make, hf: Callable[..., Any]
) -> None:
    with endless() as loader:
        first = hf(loader, 3, plain=True, max_steps=3)
        first.train()
    with endless() as loader:
        second = hf(loader, plain=True, max_steps=5)
        second.train(resume_from_checkpoint=True)
    assert first.seen + second.seen == own(endless, 5)
    with endless() as loader:
        batches = hf(loader, batched=True, max_steps=2)
        batches.train()
    assert batches.seen == own(endless, 2)


@pytest.mark.slow
def test_transformers_trainer_finds_the_last_checkpoint_and_evaluates(
    endless: Make, rows_pass: Make, hf: Callable[..., Any]
) -> None:
    how = {"max_steps": 4}
    with endless() as loader:
        hf(loader, 2, **how).train()
    with endless() as loader, rows_pass(shuffle=False) as val:
        trainer = hf(loader, **how)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.seen == own(endless, 4)[2:]
        losses = [trainer.evaluate(val.as_torch_dataset())["eval_loss"] for _ in range(2)]
        assert losses[0] == pytest.approx(losses[1])


# Lightning


@pytest.fixture
def lightning(tmp_path: Path) -> Callable[..., Any]:
    """Trains a tiny model and returns it: `seen` are the ids that it was trained on."""
    import logging

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
            logits = self.net(batch["input_ids"])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(
        loader: AsyncDataLoader, ckpt: Path | None = None, save_at: int | None = None, **how: Any
    ) -> Any:
        module, callbacks = Module(), [lightning_callback(loader)]
        if save_at is not None:
            callbacks.append(
                pl.callbacks.ModelCheckpoint(
                    tmp_path / "ck", filename="{step}", every_n_train_steps=save_at, save_top_k=-1
                )
            )
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=save_at is not None, callbacks=callbacks, **how,
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=ckpt)
        return module

    return fit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "stop"),
    [
        ("endless", {"max_steps": 6}, 3),  # no length: Lightning fetches ahead
        ("endless", {"max_steps": 6, "accumulate_grad_batches": 2}, 3),
        ("endless", {"max_epochs": 2, "limit_train_batches": 3}, 2),
        ("endless", {"max_epochs": 2, "limit_train_batches": 3}, 3),
        ("text_pass", {"max_epochs": 2}, 4),
        ("rows_pass", {"max_epochs": 2}, 3),
        ("rows_pass", {"max_epochs": 2}, 5),  # at the end of a pass
        ("rows_pass", {"max_epochs": 2}, 7),
    ],
)
def test_lightning_sees_the_loaders_batches_and_resumes_exactly(
    name: str,
    how: dict[str, Any],
    stop: int,
    lightning: Callable[..., Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    make: Make = request.getfixturevalue(name)
    with make() as loader:
        uninterrupted = lightning(loader, **how)
    assert uninterrupted.seen == own(make, len(uninterrupted.seen))

    with make() as loader:
        first = lightning(loader, save_at=stop, **how | {"max_steps": stop, "max_epochs": None})
    with make() as loader:
        second = lightning(loader, tmp_path / "ck" / f"step={stop}.ckpt", save_at=stop, **how)
    assert first.seen + second.seen == uninterrupted.seen
    assert torch.equal(second.net[1].weight, uninterrupted.net[1].weight)


# Accelerate


@pytest.mark.slow
def test_accelerate_prepares_the_loader_itself_and_resumes_exactly(
    make: Make, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    def run(loader: AsyncDataLoader, n: int, load: bool) -> Ids:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = torch.nn.Embedding(257, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        accelerator.register_for_checkpointing(AllRanks(loader))
        if load:
            accelerator.load_state(str(tmp_path))
        seen: Ids = []
        for item in loader:
            item = item.to(accelerator.device)
            accelerator.backward(net(item["input_ids"]).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(ids(item))
            if len(seen) == n:
                break
        accelerator.save_state(str(tmp_path))
        accelerator.free_memory()
        return seen

    with make() as loader:
        seen = run(loader, 3, load=False)
    with make() as loader:
        seen += run(loader, 2, load=True)
    assert seen == own(make, 5)


def test_the_state_of_another_rank_is_refused(corpus: Path) -> None:
    data = TextDataset(corpus / "parquet", tokenizer="byte", seq_len=SEQ_LEN)
    datasets: list[TorchDataset] = [
        AsyncDataLoader(data, 4, seed=1, shard=Shard(2, rank)).as_torch_dataset()
        for rank in range(2)
    ]
    with pytest.raises(StateError, match="Load the states of all ranks"):
        datasets[1].load_state_dict(datasets[0].state_dict())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_finished_batches_that_are_batched_again_are_refused(
    endless: Make, batch_size: int
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    for kind in (DataLoader, StatefulDataLoader):
        with (
            endless() as loader,
            pytest.raises(ConfigError, match="Use batch_size=None"),
        ):
            next(iter(kind(loader.as_torch_dataset(batched=True), batch_size=batch_size)))
