"""What the ranks of a run tell each other besides training: a few integers and, where something went wrong, a text.

In:    this rank's integers or text.
Out:   those of all ranks, in their order.
Where: the trainer's thread, on all ranks at the same point.
State: a process group of its own on the CPU, so that training's collectives are neither used nor disturbed.
Cost:  one small collective over gloo; nothing with a single rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from penstock.errors import PeerFailed

LONGEST = 4000
"""Characters of a text that are told."""


class Peers(Protocol):
    """The ranks of a run, as one of them sees them."""

    rank: int
    world: int
    group: Any
    """Their process group on the CPU; None for a single one."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """All ranks' integers. Nobody goes on before everybody has told theirs."""

    def texts(self, text: str) -> list[str]:
        """All ranks' texts."""


class Alone:
    """A single rank, which agrees with itself."""

    rank, world = 0, 1
    group: Any = None

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]

    def texts(self, text: str) -> list[str]:
        return [text]


class Ranks:
    """Several ranks. `torch.distributed` has to be initialised, and all of them make this at the same point."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: how long to wait for another rank. More finds a rank that hangs later; it has to
        cover what a rank may be busy with in between, a checkpoint or a compilation."""
        import torch.distributed as distributed

        self._distributed = distributed
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self._deadline_s = deadline_s
        self.group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        import torch

        told = self._all_gather(torch.tensor(list(values), dtype=torch.int64))
        return [one.tolist() for one in told]

    def texts(self, text: str) -> list[str]:
        import torch

        data = text[:LONGEST].encode("utf-8", "replace")
        lengths = [told[0] for told in self.gather([len(data)])]
        longest = max(lengths)
        if longest == 0:
            return [""] * self.world
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = self._all_gather(mine)
        return [
            one.numpy()[:length].tobytes().decode("utf-8", "replace")
            for one, length in zip(every, lengths, strict=True)
        ]

    def _all_gather(self, mine: Any) -> list[Any]:
        import torch

        every = [torch.empty_like(mine) for _ in range(self.world)]
        with reaching(self._distributed, self._deadline_s):
            self._distributed.all_gather(every, mine, group=self.group)
        return every


@contextmanager
def reaching(distributed: Any, deadline_s: float) -> Iterator[None]:
    """A collective of a group on the CPU. If another rank cannot be reached, gloo's error becomes ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(
            f"rank {distributed.get_rank()} of {distributed.get_world_size()} could not reach the other ranks within "
            f"{deadline_s:g} s: one of them has ended or hangs; see its own output ({str(error).splitlines()[0][:300]})"
        ) from error
