"""How the documentation is built: `make docs`.

In:    the pages beside this file, and the docstrings of `penstock`.
Out:   HTML. Nothing is asked of a network: no links to other projects' documentation are resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import penstock

project = "Penstock"
release = version = penstock.__version__
html_title = f"Penstock {release}"
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
highlight_language = "none"
html_theme = "furo"

default_role = "code"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

PARAMETER = re.compile(r"(?P<names>[a-z_]+(?:, [a-z_]+)*): (?P<text>.*)")
PAGE = re.compile(r"docs/([a-z-]+)\.md")


def bulleted(lines: list[str]) -> Iterator[str]:
    """A docstring with its parameters, "name: what it is" and further lines indented, as a list."""
    within = False
    for line in lines:
        found = PARAMETER.fullmatch(line)
        if found is not None and "`" not in found["names"]:
            if not within:
                yield ""
            within = True
            yield f"- **{found['names']}**: {found['text']}"
        elif within and line.startswith("    "):
            yield f"  {line.strip()}"
        else:
            within = False
            yield line


def setup(app: Any) -> None:
    """Called by Sphinx."""

    def listed(
        _: Any, kind: str, name: str, documented: Any, options: Any, lines: list[str]
    ) -> None:
        lines[:] = [PAGE.sub(r":doc:`\1`", line) for line in bulleted(lines)]

    def outside(_: Any, name: str, source: list[str]) -> None:
        # A file that is no page of this site is to be had as it is, whatever its name ends in.
        source[0] = source[0].replace("](../", "](path:../")

    app.connect("autodoc-process-docstring", listed)
    app.connect("source-read", outside)
