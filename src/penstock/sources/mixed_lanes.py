"""The lanes of a mixture, and those of its parts below them.

In:    a mixture, and a place for each lane.
Out:   a packer for each lane; what is counted and known of all parts together.
Where: the producer thread; counts are asked for by others too.
State: the lanes of each part that are open. Where parts are restarted, those of all lanes, for ever; else
       each lane opens its own, anew for each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.feed.pool import Pool, Scoped, Works
from penstock.order.mix import Chooser
from penstock.sources.mixed_rows import MixPacker
from penstock.sources.source import Lanes, Run

if TYPE_CHECKING:
    from penstock.sources.mixture import MixPlace, MixtureSource


@dataclass(slots=True)
class _Child:
    """One part of a run: how to open its lanes."""

    source: Any
    run: Run
    pool: Pool
    work: Any

    def open(self, lanes: Sequence[int], places: Mapping[int, Any], end_epoch: int | None) -> Lanes:
        # Lanes that are opened one by one share the memory of the part.
        share = max(1, self.run.read_ahead_bytes * len(lanes) // len(self.run.own_lanes))
        run = replace(self.run, places=places, end_epoch=end_epoch, read_ahead_bytes=share)
        if len(lanes) == 1:
            run = replace(run, shard=type(run.shard)(run.lanes, lanes[0]))
        opened: Lanes = self.source.open_lanes(run, self.pool, self.work)
        return opened


class MixLanes:
    """The lanes of one run."""

    def __init__(
        self, source: MixtureSource, run: Run, runs: Mapping[str, Run], pool: Pool, work: Works
    ) -> None:
        self._opened: dict[tuple[int, int], Lanes] = {}
        self._over: list[dict[str, int]] = [{}, {}]
        self._names = source.names
        self.packers: list[MixPacker] = []
        try:
            self._open(source, run, runs, pool, work)
        except BaseException:
            self.stop()
            self.close()
            raise

    def _open(
        self, source: MixtureSource, run: Run, runs: Mapping[str, Run], pool: Pool, work: Works
    ) -> None:
        own = list(run.own_lanes)
        children = [
            _Child(part, runs[name], Scoped(pool, name), work.named(name))
            for name, part in zip(source.names, source.parts, strict=True)
        ]
        places: Mapping[int, MixPlace] = run.places
        behind = min((places[lane] for lane in own), key=lambda place: place.row)
        chooser = Chooser(run.weights, behind.row * run.lanes, behind.counts)
        endless = source.mixture.on_end == "restart"
        if endless:
            # All lanes of a part at once: they share what it reads.
            at = [{lane: places[lane].places[i] for lane in own} for i in range(len(children))]
            together = [
                self._keep(i, -1, c.open(own, p, None)).packers
                for i, (c, p) in enumerate(zip(children, at, strict=True))
            ]

        def opener(lane: int) -> Callable[[int, int, Any], Any]:
            def open_part(part: int, epoch: int, place: Any) -> Any:
                if endless:
                    return together[part][own.index(lane)]
                return self._keep(
                    part, lane, children[part].open([lane], {lane: place}, epoch + 1)
                ).packers[0]

            return open_part

        self.packers = [
            MixPacker(
                lane=lane,
                lanes=run.lanes,
                own=len(own),
                start=places[lane],
                chooser=chooser,
                schedule=run.weights,
                on_end=source.mixture.on_end,
                end_epoch=run.end_epoch,
                first_places=[part.first_place for part in source.parts],
                open_part=opener(lane),
                width=source.seq_len + 1,
                dtype=source.dtype,
            )
            for lane in own
        ]

    def _keep(self, part: int, lane: int, lanes: Lanes) -> Lanes:
        """Know the lanes of a part, in place of those of the pass before."""
        over = self._opened.get((part, lane))
        if over is not None:
            over.stop()
            over.close()
            for into, counts in zip(self._over, (_of_lanes(over), over.bad()), strict=True):
                _add(into, counts)
        self._opened[part, lane] = lanes
        return lanes

    def totals(self) -> dict[str, int]:
        totals = dict(self._over[0])
        opened = list(self._opened.items())
        for _, lanes in opened:
            _add(totals, _of_lanes(lanes))
        # All lanes of a part share its work, so what that counts is counted once.
        for lanes in {part: lanes for (part, _), lanes in opened}.values():
            if hasattr(lanes, "of_work"):
                _add(totals, lanes.of_work())
        for i, name in enumerate(self._names):
            totals[f"rows of {name}"] = sum(packer.given[i] for packer in self.packers)
        return totals

    def ahead(self) -> tuple[int, int]:
        """Pieces of work of all parts: those that are ready, and those asked for."""
        parts = [lanes.ahead() for lanes in list(self._opened.values()) if hasattr(lanes, "ahead")]
        return sum(ready for ready, _ in parts), sum(asked for _, asked in parts)

    @property
    def tight(self) -> bool:
        """Whether a part is held back by its share of the memory."""
        return any(getattr(lanes, "tight", False) for lanes in list(self._opened.values()))

    @property
    def fetches(self) -> int:
        """Requests that a part may have under way at once: of the one with most."""
        fetches = [0] * len(self._names)
        for (part, _), lanes in list(self._opened.items()):
            fetches[part] += getattr(lanes, "fetches", 0)
        return max(fetches)

    @property
    def cached(self) -> bool:
        """Whether every part that can keep token chunks on disk does."""
        kept = [getattr(lanes, "cached", None) for lanes in list(self._opened.values())]
        return True in kept and False not in kept

    def fetch_times(self) -> dict[str, Any] | None:
        """Of the part that fetches most."""
        known = [
            lanes.fetch_times()
            for lanes in list(self._opened.values())
            if hasattr(lanes, "fetch_times")
        ]
        return max(filter(None, known), key=lambda times: int(times["requests"]), default=None)

    def bad(self) -> dict[str, int]:
        bad = dict(self._over[1])
        for lanes in list(self._opened.values()):
            _add(bad, lanes.bad())
        return bad

    def stop(self) -> None:
        for lanes in list(self._opened.values()):
            lanes.stop()

    def close(self) -> None:
        for lanes in self._opened.values():
            lanes.close()


def _of_lanes(lanes: Lanes) -> dict[str, int]:
    """What was counted for these lanes alone."""
    counts: dict[str, int] = lanes.of_lanes() if hasattr(lanes, "of_lanes") else lanes.totals()
    return counts


def _add(into: dict[str, int], more: Mapping[str, int]) -> None:
    for name, n in more.items():
        into[name] = into.get(name, 0) + n
