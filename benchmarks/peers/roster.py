"""Who takes part, and with what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Group = Literal["text, as documented", "text, with our tokenizer", "tokens", "limit"]
DOCUMENTED: Group = "text, as documented"
HANDED: Group = "text, with our tokenizer"
PREPARED: Group = "tokens"
LIMIT: Group = "limit"


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One row of the table."""

    name: str
    module: str
    environment: str
    group: Group
    variant: str = ""
    shuffle: bool = False
    """In the measurement of speed; `resume` and `workers` shuffle all that can."""
    slow: bool = False
    """Given a tenth of the text: it would take minutes otherwise."""
    far: bool = False
    """Can be given a Hub's address."""
    prepares: bool = False
    workers: bool = True
    """Has workers, so that their number may matter."""
    paced: bool = False
    """A yardstick for consumers that wait, and for nothing else."""

    @property
    def tokenizer(self) -> Literal["own", "ours", "none"]:
        """Which it is given."""
        if self.module == "ours" and self.group != PREPARED:
            return "own"
        return {DOCUMENTED: "own", HANDED: "ours", PREPARED: "none", LIMIT: "none"}[self.group]  # type: ignore[return-value]


PENSTOCK = "Penstock"
PENSTOCK_TORCH = "Penstock, tensors"
PENSTOCK_SHUFFLED = "Penstock, shuffled"
PENSTOCK_TOKENS = "Penstock, token file"
LIMIT_TEXT = "limit: decode + gigatoken alone"
LIMIT_COPY = "limit: bare gather and copy"
LIMIT_LIST = "limit: batches in a list"
LIMIT_DEQUE = "limit: batches in a deque, taken in Python"


def _twice(name: str, module: str, environment: str, **more: Any) -> tuple[Entrant, Entrant]:
    """With the tokenizer of its documentation, and with ours."""
    documented = Entrant(
        name=name, module=module, environment=environment, group=DOCUMENTED, slow=True, **more
    )
    return documented, replace(documented, name=f"{name} + gigatoken", group=HANDED, slow=False)


ENTRANTS: tuple[Entrant, ...] = (
    Entrant(name=LIMIT_TEXT, module="limits", environment="penstock", group=LIMIT, variant="text"),
    Entrant(name=PENSTOCK, module="ours", environment="penstock", group=DOCUMENTED, far=True),
    Entrant(
        name=PENSTOCK_TORCH,
        module="ours",
        environment="penstock",
        group=DOCUMENTED,
        variant="torch",
        far=True,
    ),
    Entrant(
        name=PENSTOCK_SHUFFLED,
        module="ours",
        environment="penstock",
        group=DOCUMENTED,
        shuffle=True,
    ),
    *_twice("plain loop, tokenizers", "plain", "plain", far=True, workers=False),
    Entrant(
        name="plain loop, tiktoken",
        module="plain",
        environment="plain",
        group=DOCUMENTED,
        variant="tiktoken",
        slow=True,
        workers=False,
    ),
    *_twice("datasets + StatefulDataLoader", "hf_streaming", "datasets", far=True),
    *_twice("PyTorch DataLoader", "torch_loader", "torch", variant="stateful"),
    *_twice("torchdata.nodes", "torchdata_nodes", "torch"),
    *_twice("Grain", "grain_packed", "grain"),
    Entrant(
        name="Grain, processes + gigatoken",
        module="grain_packed",
        environment="grain",
        group=HANDED,
        variant="processes",
    ),
    *_twice("SPDL", "spdl_pipeline", "spdl"),
    *_twice("litdata, Parquet", "lit", "litdata", variant="parquet", prepares=True),
    *_twice("MosaicML Streaming, MDS of text", "mosaic", "mosaic", variant="text", prepares=True),
    Entrant(
        name=LIMIT_COPY,
        module="limits",
        environment="penstock",
        group=LIMIT,
        variant="copy torch",
        shuffle=True,
    ),
    Entrant(
        name=LIMIT_LIST,
        module="limits",
        environment="penstock",
        group=LIMIT,
        variant="list",
        paced=True,
    ),
    Entrant(
        name=LIMIT_DEQUE,
        module="limits",
        environment="penstock",
        group=LIMIT,
        variant="deque",
        paced=True,
    ),
    Entrant(
        name=PENSTOCK_TOKENS,
        module="ours",
        environment="penstock",
        group=PREPARED,
        variant="tokens torch",
        shuffle=True,
        prepares=True,
    ),
    Entrant(
        name="litdata, TokensLoader",
        module="lit",
        environment="litdata",
        group=PREPARED,
        variant="tokens",
        prepares=True,
    ),
    Entrant(
        name="MosaicML Streaming, MDS of tokens",
        module="mosaic",
        environment="mosaic",
        group=PREPARED,
        prepares=True,
    ),
    Entrant(
        name="memory map, nanoGPT",
        module="memory_map",
        environment="torch",
        group=PREPARED,
        shuffle=True,
        prepares=True,
        workers=False,
    ),
)
