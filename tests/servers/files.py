"""A plain HTTP server of files, on loopback: ranges, ETags, conditions, and faults.

In:    names and what they hold.
Out:   GET and HEAD of `/name`.
State: the files, which `put()` may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from tests.servers.content import Content, Shelf, Source
from tests.servers.loopback import Loopback
from tests.servers.reply import Call, Reply, reply_error, reply_file


class FileServer(Loopback):
    """Serves files by name; use it as a context manager."""

    def __init__(
        self, files: Mapping[str, Source] | None = None, *, etags: bool = True, dates: bool = True, port: int = 0
    ) -> None:  # fmt: skip
        """`etags`, `dates`: whether answers have an ETag, and say when the file was last modified.
        `port`: where to listen; 0 takes a free one.
        """
        super().__init__(("files",), port=port)
        self._etags, self._dates = etags, dates
        self._shelf = Shelf()
        self._files: dict[str, Content] = {}
        for name, source in (files or {}).items():
            self.put(name, source)
        self._listen()

    @property
    def url(self) -> str:
        return self._addresses["files"]

    def url_of(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"

    def put(self, name: str, source: Source) -> None:
        """Add a file, or change one: other content has another ETag."""
        content = self._shelf.content(source)
        if self._etags:
            _ = content.version  # now, and not while somebody waits for the first answer
        with self._lock:
            self._files[name] = content

    def remove(self, name: str) -> None:
        with self._lock:
            del self._files[name]

    def answer(self, call: Call) -> Reply:
        if call.method not in ("GET", "HEAD"):
            return reply_error(405, f"{call.method} is not possible here", {"Allow": "GET, HEAD"})
        with self._lock:
            content = self._files.get(call.path.removeprefix("/"))
        if content is None:
            return reply_error(404, "no such file")
        return reply_file(
            call, content, f'"{content.version}"' if self._etags else "", dated=self._dates
        )
