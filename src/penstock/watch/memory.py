"""How much memory this process holds."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """Memory of this process; 0 where that cannot be told."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0  # not Linux
