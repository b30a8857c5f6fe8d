"""A loader inside the real libraries that train: what they see is the loader's own stream, also after a resume."""

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
from penstock.errors import StateFormat, StateMismatch
from penstock.torch_dataset import AllRanks, TorchDataset, TrainerMixin, lightning_callback

pytestmark = [
    pytest.mark.slow,  # `make test` runs the code of docs/integrations.md
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

Make = Callable[[], AsyncDataLoader]
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
    return partial(AsyncDataLoader, data, 4, shuffle=True, seed=1, n_workers=1)


@pytest.fixture
def text_pass(corpus: Path) -> Make:
    """One pass over text: finite, but nobody knows the length beforehand."""
    data = TextDataset(
        corpus / "docs.jsonl", tokenizer="byte", seq_len=SEQ_LEN, split="val", val_fraction=0.05
    )
    return partial(AsyncDataLoader, data, 4, shuffle=True, seed=1, n_workers=1, epochs=1)


@pytest.fixture
def rows_pass() -> Make:
    """One pass of known length: five batches, the last one short."""
    return partial(AsyncDataLoader, Rows(18), 4, seed=1, n_workers=1, epochs=1)


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


# torch.utils.data.DataLoader


def test_dataloader_hands_out_the_loaders_batches(make: Make) -> None:
    with make() as loader:
        seen = take(DataLoader(loader.as_torch_dataset(), batch_size=None), 5)
    assert seen == own(make, 5)


@pytest.mark.parametrize("name", ["text_pass", "rows_pass"])
def test_each_for_over_a_dataloader_is_the_next_pass(
    name: str, request: pytest.FixtureRequest
) -> None:
    make: Make = request.getfixturevalue(name)
    n = length_of_pass(make)
    with make() as loader:
        dataloader = DataLoader(loader.as_torch_dataset(), batch_size=None)
        passes = [take(dataloader, 1000) for _ in range(3)]
    assert [len(p) for p in passes] == [n, n, n]
    assert [batch for p in passes for batch in p] == own(make, 3 * n)
    assert passes[0] != passes[1]


def test_length_is_given_where_it_is_known_and_a_type_error_elsewhere(
    endless: Make, text_pass: Make, rows_pass: Make
) -> None:
    assert len(DataLoader(rows_pass().as_torch_dataset(), batch_size=None)) == 5
    for make in (endless, text_pass):
        with pytest.raises(TypeError, match="has no len"):
            len(DataLoader(make().as_torch_dataset(), batch_size=None))


def test_workers_of_a_dataloader_are_refused(endless: Make) -> None:
    dataset = endless().as_torch_dataset()
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(
            iter(
                DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
            )
        )


# State


@pytest.mark.parametrize("k", [0, 1, 4])
def test_state_of_a_dataset_restores_the_rest(make: Make, k: int) -> None:
    whole = own(make, 8)
    with make() as loader:
        dataset = loader.as_torch_dataset()
        take(dataset, k) if k else None
        saved = json.loads(json.dumps(dataset.state_dict()))
    with make() as loader:
        dataset = loader.as_torch_dataset()
        dataset.load_state_dict(saved)
        rest = take(dataset, 8 - k)
        rest += take(dataset, 8 - k - len(rest)) if len(rest) < 8 - k else []
    assert rest == whole[k:]


def test_a_state_that_is_none_is_refused(endless: Make) -> None:
    dataset = endless().as_torch_dataset()
    for state in (
        {"loader": "{"},
        {"loader": "{}"},
        {"loader": 3},
        {},
    ):
        with pytest.raises(StateFormat):
            dataset.load_state_dict(state)


# torchdata


@pytest.mark.parametrize("k", [0, 1, 4])
def test_stateful_dataloader_resumes_exactly(make: Make, k: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    whole = own(make, 9)
    with make() as loader:
        dataloader = StatefulDataLoader(loader.as_torch_dataset(), batch_size=None, num_workers=0)
        seen = take(dataloader, k) if k else []
        saved = pickle.loads(pickle.dumps(dataloader.state_dict()))
    with make() as loader:
        dataloader = StatefulDataLoader(loader.as_torch_dataset(), batch_size=None, num_workers=0)
        dataloader.load_state_dict(saved)
        while len(seen) < 9:
            seen += take(dataloader, 9 - len(seen))
    assert seen == whole


# torch.distributed.checkpoint


def test_loader_and_dataset_are_stateful(endless: Make) -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    loader = endless()
    assert isinstance(loader, Stateful)
    assert isinstance(loader.as_torch_dataset(), Stateful)
    assert isinstance(AllRanks(loader.as_torch_dataset()), Stateful)


def whole(loader: AsyncDataLoader) -> Any:
    return loader


def as_dataset(loader: AsyncDataLoader) -> Any:
    return loader.as_torch_dataset()


def as_all_ranks(loader: AsyncDataLoader) -> Any:
    return AllRanks(loader.as_torch_dataset())


@pytest.mark.parametrize("form", [whole, as_dataset, as_all_ranks])
def test_distributed_checkpoint_gives_the_state_back_as_it_was(
    make: Make, form: Callable[[AsyncDataLoader], Any], tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    with make() as loader:
        take(loader.as_torch_dataset(), 3)
        saved = loader.state_dict()
        dcp.save({"stream": form(loader)}, checkpoint_id=tmp_path / "step")
    with make() as loader:
        dcp.load({"stream": form(loader)}, checkpoint_id=tmp_path / "step")
        assert loader.state_dict() == saved
        assert take(loader.as_torch_dataset(), 2) == own(make, 5)[3:]


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

    class Recording(TrainerMixin, Trainer):  # type: ignore[misc]
        seen: Ids

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(ids(inputs))
            return super().training_step(model, inputs, *args, **kwargs)

    def make(loader: AsyncDataLoader, stop: int | None = None, **more: Any) -> Any:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=257, n_positions=SEQ_LEN, n_embd=8, n_layer=1, n_head=1)
        settings: dict[str, Any] = {"save_strategy": "no", "per_device_train_batch_size": 4} | more
        if stop is not None:
            settings |= {"save_strategy": "steps", "save_steps": stop}
        args = TrainingArguments(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
            **settings,
        )  # fmt: skip
        dataset = loader.as_torch_dataset(shift=False)
        trainer = Recording(
            GPT2LMHeadModel(config), args, train_dataset=dataset, callbacks=[Stop(stop)]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.seen = []
        return trainer

    return make


def weights(trainer: Any) -> list[float]:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


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


def test_transformers_trainer_finds_the_last_checkpoint_and_evaluates(
    endless: Make, rows_pass: Make, hf: Callable[..., Any]
) -> None:
    how = {"max_steps": 4}
    with endless() as loader:
        hf(loader, 2, **how).train()
    with endless() as loader, rows_pass() as val:
        trainer = hf(loader, **how)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.seen == own(endless, 4)[2:]
        assert trainer.evaluate(val.as_torch_dataset(shift=False))["eval_loss"] > 0


# Lightning


@pytest.fixture
def lightning(tmp_path: Path) -> Callable[..., Any]:
    """Trains a tiny model, and gives it and its dataset back: `seen` are the ids that it was trained on."""
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
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten()
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(
        stream: AsyncDataLoader | TorchDataset,
        ckpt: Path | None = None,
        save_at: int | None = None,
        more: Iterable[Any] = (),
        **how: Any,
    ) -> Any:
        dataset = stream.as_torch_dataset() if isinstance(stream, AsyncDataLoader) else stream
        module, callbacks = Module(), [lightning_callback(dataset), *more]
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
        trainer.fit(module, DataLoader(dataset, batch_size=None), ckpt_path=ckpt)
        return module, dataset

    return fit


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has", "ignore:You're resuming from")
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
        uninterrupted, _ = lightning(loader, **how)
    assert uninterrupted.seen == own(make, len(uninterrupted.seen))

    with make() as loader:
        first, _ = lightning(loader, save_at=stop, **how | {"max_steps": stop, "max_epochs": None})
    with make() as loader:
        second, _ = lightning(loader, tmp_path / "ck" / f"step={stop}.ckpt", save_at=stop, **how)
    assert first.seen + second.seen == uninterrupted.seen
    assert torch.equal(second.net[1].weight, uninterrupted.net[1].weight)


def test_lightning_leaves_the_stream_at_the_batch_that_was_trained_last(
    endless: Make, lightning: Callable[..., Any]
) -> None:
    with endless() as loader:
        module, dataset = lightning(loader, max_steps=3)
        assert module.seen + take(dataset, 2) == own(endless, 5)


# Accelerate


def test_accelerate_without_preparing_the_dataloader_resumes_exactly(
    make: Make, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    def run(loader: AsyncDataLoader, n: int, load: bool) -> Ids:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = torch.nn.Embedding(257, 4)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        dataset = loader.as_torch_dataset()
        accelerator.register_for_checkpointing(AllRanks(dataset))
        if load:
            accelerator.load_state(str(tmp_path))
        seen: Ids = []
        for item in DataLoader(dataset, batch_size=None):
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
    with pytest.raises(StateMismatch, match="Load the states of all ranks"):
        datasets[1].load_state_dict(datasets[0].state_dict())
