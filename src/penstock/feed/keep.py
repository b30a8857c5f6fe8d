"""Write token chunks to the cache behind the run's back.

In:    chunks as workers make them: `offer` never waits, `put` does.
Out:   entries of the token cache.
Where: one thread, "penstock-cache", started by the first chunk.
State: the chunks that wait, bounded in bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from penstock.read.cache import Key, TokenCache
from penstock.types import MiB, TokenChunk

QUEUED_BYTES = 64 * MiB
"""Chunks that may wait to be written. More of them ride out a slower disk, and take that much memory."""


class CacheWriter:
    """The thread that writes to a token cache for those who read together."""

    def __init__(self, cache: TokenCache, max_queued_bytes: int = QUEUED_BYTES) -> None:
        self._cache = cache
        self._max_queued_bytes = max_queued_bytes
        # Reentrant, because a garbage collection may close a writer on a thread that is in here.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[tuple[Key, TokenChunk]] = deque()
        self._queued_bytes = 0
        self.skipped = 0
        """Chunks for which there was no room in the queue."""
        self._busy = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def offer(self, key: Key, chunk: TokenChunk) -> bool:
        """Have a chunk written if the queue has room for it. Never waits."""
        with self._changed:
            if self._stopped or self._cache.off is not None:
                return False
            if not self._fits(chunk):
                self.skipped += 1
                return False
            self._add(key, chunk)
        return True

    def put(self, key: Key, chunk: TokenChunk, timeout: float) -> bool:
        """Have a chunk written; waits for room in the queue. False if there is none by then, or the writer is stopped."""
        with self._changed:
            room = self._changed.wait_for(lambda: self._stopped or self._fits(chunk), timeout)
            if self._stopped or not room:
                return False
            self._add(key, chunk)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until all that was taken is written. False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(self._done, timeout)

    def stop(self) -> None:
        """Take no more chunks. Waits for nobody; what was taken is still written."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> bool:
        """Write what was taken and end the thread. What a slow disk leaves undone by then is dropped: False."""
        deadline = time.monotonic() + timeout
        self.stop()
        done = self.flush(timeout)
        with self._changed:
            for _, chunk in self._waiting:
                self._queued_bytes -= chunk.nbytes
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return done
        # A thread that hangs in a system call cannot be ended; it is a daemon, and holds nothing up.
        thread.join(max(0.0, deadline - time.monotonic()))
        return done and not thread.is_alive()

    def _fits(self, chunk: TokenChunk) -> bool:
        # One that is larger than the whole queue goes through alone.
        return (
            self._queued_bytes == 0 or self._queued_bytes + chunk.nbytes <= self._max_queued_bytes
        )

    def _done(self) -> bool:
        return not self._waiting and not self._busy

    def _add(self, key: Key, chunk: TokenChunk) -> None:
        self._waiting.append((key, chunk))
        self._queued_bytes += chunk.nbytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-cache", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            key, chunk = taken
            try:
                self._cache.put(key, chunk)
            except BaseException as error:  # nobody waits for this thread: the cache says it, once
                self._cache.turn_off(f"{type(error).__name__}: {error}", error)
            finally:
                nbytes = chunk.nbytes
                del taken, chunk  # an idle thread must not keep the last chunk alive
                with self._changed:
                    self._queued_bytes -= nbytes
                    self._busy = False
                    self._changed.notify_all()

    def _take(self) -> tuple[Key, TokenChunk] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or bool(self._waiting))
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()
