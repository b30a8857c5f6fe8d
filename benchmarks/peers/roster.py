"""The contenders, and in which environment and variant each runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Group = Literal["limit", "documented", "our tokenizer", "tokens"]


@dataclass(frozen=True)
class Entrant:
    """One row of the table."""

    name: str
    module: str
    environment: str
    group: Group = "documented"
    variant: str = ""
    shuffle: bool = False
    """In the measurement of speed; `resume` and `workers` shuffle if the contender can."""
    slow: bool = False
    """Given a tenth of the text: it would take minutes otherwise."""
    remote: bool = False
    """Reads a Hub."""
    prepares: bool = False
    workers: bool = True

    @property
    def tokenizer(self) -> Literal["own", "ours", "none"]:
        if self.group == "our tokenizer":
            return "ours"
        return "own" if self.group == "documented" else "none"


PENSTOCK = "Penstock"
PENSTOCK_TOKENS = "Penstock, token file"
LIMIT = "limit: decode + gigatoken alone"


def _twice(name: str, module: str, environment: str, **more: Any) -> tuple[Entrant, Entrant]:
    """Return it with the tokenizer of its documentation, and with ours."""
    documented = Entrant(name, module, environment, slow=True, **more)
    handed = replace(documented, name=f"{name} + gigatoken", group="our tokenizer", slow=False)
    return documented, handed


ENTRANTS: tuple[Entrant, ...] = (
    Entrant(LIMIT, "limits", "penstock", "limit"),
    Entrant(PENSTOCK, "ours", "penstock", remote=True),
    Entrant("Penstock, tensors", "ours", "penstock", variant="torch", remote=True),
    Entrant("Penstock, shuffled", "ours", "penstock", shuffle=True),
    *_twice("plain loop, tokenizers", "plain", "plain", remote=True, workers=False),
    Entrant(
        "plain loop, tiktoken", "plain", "plain", variant="tiktoken", slow=True, workers=False
    ),
    *_twice("datasets + StatefulDataLoader", "hf_streaming", "datasets", remote=True),
    *_twice("PyTorch DataLoader", "torch_loader", "torch", variant="stateful"),
    *_twice("torchdata.nodes", "torchdata_nodes", "torch"),
    *_twice("Grain", "grain_packed", "grain"),
    Entrant(
        "Grain, processes + gigatoken", "grain_packed", "grain", "our tokenizer", "processes"
    ),
    *_twice("SPDL", "spdl_pipeline", "spdl"),
    *_twice("litdata, Parquet", "lit", "litdata", variant="parquet", prepares=True),
    *_twice("MosaicML Streaming, MDS of text", "mosaic", "mosaic", variant="text", prepares=True),
    Entrant(
        PENSTOCK_TOKENS, "ours", "penstock", "tokens", "torch", shuffle=True, prepares=True
    ),
    Entrant(
        "Penstock, prepared corpus", "ours", "penstock", "tokens", "prepared", shuffle=True,
        prepares=True,
    ),
    Entrant("litdata, TokensLoader", "lit", "litdata", "tokens", "tokens", prepares=True),
    Entrant("MosaicML Streaming, MDS of tokens", "mosaic", "mosaic", "tokens", prepares=True),
    Entrant("LanceDB", "lance_rows", "lancedb", "tokens", shuffle=True, prepares=True),
    Entrant(
        "memory map, nanoGPT", "memory_map", "torch", "tokens", shuffle=True, prepares=True,
        workers=False,
    ),
)  # fmt: skip
