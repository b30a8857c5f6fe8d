"""How much memory this process holds.

In:    what the system says of it.
Out:   bytes that are resident; 0 where nobody counts them.
Where: any thread.
State: none.
"""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """Memory of this process; 0 where that cannot be told."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0  # not Linux
