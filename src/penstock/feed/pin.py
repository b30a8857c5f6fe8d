"""Which cores the workers may use.

In:    core numbers, a NUMA node, or both.
Out:   the set of cores, checked against what this process may use.
Where: `resolve` on the thread that creates a loader; `pin` on the thread that is pinned.
State: none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from penstock.config import whole_number
from penstock.errors import ConfigError

NODES = Path("/sys/devices/system/node")


def resolve(cpus: Iterable[int] | None, numa_node: int | None) -> frozenset[int] | None:
    """The cores that both settings allow, or None if neither is given."""
    if cpus is None and numa_node is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            "cpus=… and numa_node=… need Linux: this system cannot pin a thread to a core. Leave them out."
        )
    usable = frozenset(os.sched_getaffinity(0))
    chosen = usable
    if numa_node is not None:
        node = _node(numa_node)
        chosen = node & usable
        if not chosen:
            raise ConfigError(
                f"numa_node={numa_node} has the cores {_listed(node)}, of which this process may use none: it may use "
                f"{_listed(usable)}. Choose another node, or start the process with other cores (taskset, the scheduler)."
            )
    if cpus is not None:
        asked = _numbers(cpus)
        missing = asked - usable
        if missing:
            raise ConfigError(
                f"cpus: {_listed(missing)} cannot be used by this process; it may use {_listed(usable)}. Leave them "
                "out, or start the process with other cores (taskset, the scheduler)."
            )
        if not asked & chosen:
            raise ConfigError(
                f"cpus={_listed(asked)} and numa_node={numa_node} have no core in common: the node has "
                f"{_listed(chosen)}. Give one of the two."
            )
        chosen &= asked
    return chosen


def pin(cpus: frozenset[int]) -> None:
    """Keep the calling thread, and what it will start, to these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def _numbers(cpus: Iterable[int]) -> frozenset[int]:
    if isinstance(cpus, str | bytes) or not isinstance(cpus, Iterable):
        raise ConfigError(f"cpus={cpus!r}: needs core numbers, such as range(8) or [0, 2, 4]")
    asked = frozenset(whole_number("cpus: a core number", cpu, 0) for cpu in cpus)
    if not asked:
        raise ConfigError("cpus is empty: give at least one core, or None for all of them")
    return asked


def _node(number: int) -> frozenset[int]:
    whole_number("numa_node", number, 0)
    try:
        text = (NODES / f"node{number}" / "cpulist").read_text()
    except OSError:
        names = [path.name.removeprefix("node") for path in NODES.glob("node[0-9]*")]
        known = ", ".join(sorted(names, key=int))
        has = (
            f"this system has the nodes {known}"
            if known
            else f"this system shows no NUMA nodes in {NODES}"
        )
        raise ConfigError(f"numa_node={number}: {has}.") from None
    return parse_list(text)


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a kernel list such as `0-3,8-11`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def _listed(cpus: frozenset[int]) -> str:
    """Core numbers as the kernel writes them: `0-3,8`."""
    parts: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], cpu)
        else:
            parts.append((cpu, cpu))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts) or "none"
