"""Values on their way into a heartbeat: read at once where that is cheap, later where a device has them.

In:    what a trainer gives as loss and the like: numbers, tensors, anything.
Out:   numbers, or a `Late` that the heartbeat's thread reads.
Where: `keep_value` and `compile_count` on the trainer's thread, the rest on the heartbeat's.
State: none.

torch is never imported here: a process that has none of it has none of its tensors.
"""

from __future__ import annotations

import math
import operator
import platform
import sys
from collections.abc import Mapping
from typing import Any

from penstock.config import installed_version

Line = Mapping[str, Any]


NOT_MEASURED = frozenset(("ts", "mono", "pid", "rank", "step"))
"""Numbers of a line that are no metric."""


class Unreadable(str):
    """Why a tensor has no number."""


class Late:
    """A tensor on a device. To read it on the trainer's thread would make the host wait for the device."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()
        self._computed: Any = None
        torch: Any = sys.modules.get("torch")
        if torch is not None and tensor.device.type == "cuda":
            # Reading blocks until the device is there, and a device that hangs would stop the beats: so ask first.
            self._computed = torch.cuda.Event()
            self._computed.record(torch.cuda.current_stream(tensor.device))

    def ready(self) -> bool:
        """Whether it can be read without waiting, as far as that can be told."""
        return self._computed is None or bool(self._computed.query())

    def read(self) -> float | Unreadable | None:
        """The number; None if the device has not computed it."""
        if not self.ready():
            return None
        try:
            return float(self._tensor.item())
        except (
            Exception
        ) as error:  # more than one value, or a device that is lost: the line says so
            return Unreadable(f"{type(error).__name__}: {error}"[:200])


def keep_value(value: Any) -> Any:
    """What to keep of a value now, without waiting for anything and without an exception."""
    if type(value) in _PLAIN:
        return value
    device = getattr(value, "device", None)
    if device is None or not hasattr(value, "detach"):
        return value
    if hasattr(value, "to_local"):
        # Its value is known to all ranks together only, and one thread must not begin what needs them all.
        return Unreadable("a DTensor: give its .full_tensor()")
    try:
        return float(value.detach().item()) if device.type == "cpu" else Late(value)
    except Exception as error:
        return Unreadable(f"{type(error).__name__}: {error}"[:200])


_PLAIN = frozenset((float, int, str, bool, type(None), dict, list))


def numbers(line: Line) -> dict[str, float]:
    """The numbers of a line, nested ones as `outer/inner`. A loss that is not finite is that float again."""
    found: dict[str, float] = {}
    for name, value in line.items():
        kind = type(value)
        if kind is float or kind is int:
            _add(found, name, value)
        elif isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
        elif name == "loss" and value in ("nan", "inf", "-inf"):
            found[name] = float(value)
    return found


def settle(fields: dict[str, Any]) -> dict[str, Any]:
    """Read what is late. A value that the device has not computed is left out, one that has no number says why."""
    settled: dict[str, Any] = {}
    for name, value in fields.items():
        now: Any = value.read() if isinstance(value, Late) else value
        if isinstance(now, Unreadable):
            settled[f"{name}_unreadable"] = str(now)
        elif now is not None or value is None:
            settled[name] = now
    return settled


def _add(found: dict[str, float], name: str, value: float) -> None:
    try:
        number = float(value)
    except OverflowError:
        return  # an int beyond all floats is no measurement
    if (math.isfinite(number) or name == "loss") and name not in NOT_MEASURED:
        found[name] = number


def count_of(value: Any) -> int:
    """A count, of whatever kind the number is that `keep_value` has kept; 0 for what is none."""
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else 0
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # text, nothing, or a tensor that its device is yet to compute
        return 0


def compile_count() -> int | None:
    """How many graphs torch has compiled so far; None if it compiles nothing."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return None
    try:
        return int(dynamo.counters["stats"]["unique_graphs"])
    except (
        Exception
    ):  # not a public name: another version may have another one, and the field is then missing
        return None


def device_bytes() -> int | None:
    """Memory that torch holds on this process's CUDA device; None without one."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return int(cuda.memory_allocated())


def versions() -> dict[str, str]:
    """Of what takes part in a run: as it is loaded, or, since a run begins before it needs torch, as it is installed."""
    from penstock import __version__

    found = {"python": platform.python_version(), "penstock": __version__}
    for name in ("torch", "numpy", "pyarrow", "gigatoken", "tokenizers"):
        version = getattr(sys.modules.get(name), "__version__", None) or installed_version(name)
        if version is not None:
            found[name] = str(version)
    return found
