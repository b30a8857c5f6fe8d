"""Choose the CPU cores that workers run on, and pin threads to them.

`resolve` checks the settings against the cores that this process may use; `pin` applies the
result to the calling thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import ConfigError
from penstock.options import read_cpus

NODES = Path("/sys/devices/system/node")


def resolve(cpus: Iterable[int] | None, numa_node: int | None) -> frozenset[int] | None:
    """Return the cores that both settings allow, or None if neither is given."""
    if cpus is None and numa_node is None:
        return None
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cpus=… and numa_node=… need Linux. Leave them out.")
    chosen = usable = frozenset(os.sched_getaffinity(0))
    if cpus is not None:
        chosen = frozenset(cpus)
        if not chosen <= usable:
            raise ConfigError(
                f"cpus={sorted(chosen)}: choose among the cores that this process may use, {sorted(usable)}, "
                "or start it with other cores (taskset, the scheduler)."
            )
    if numa_node is not None:
        node, allowed = _node_cores(numa_node), chosen
        chosen = node & allowed
        if not chosen:
            raise ConfigError(
                f"numa_node={numa_node} has the cores {sorted(node)}, but cpus and this process allow only "
                f"{sorted(allowed)}. Choose another node or other cores."
            )
    return chosen


def pin(cpus: frozenset[int] | None) -> None:
    """Restrict the calling thread, and threads and processes it starts, to these cores."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def _node_cores(number: int) -> frozenset[int]:
    try:
        text = (NODES / f"node{number}" / "cpulist").read_text()
    except OSError:
        known = sorted(path.name for path in NODES.glob("node[0-9]*"))
        raise ConfigError(
            f"numa_node={number}: not found among {', '.join(known) or 'no nodes'} in {NODES}"
        ) from None
    return frozenset(read_cpus(text) if text.strip() else ())  # a node may have no cores
