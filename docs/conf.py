"""Build the documentation as HTML (`make docs`) from these pages and the docstrings of `penstock`.

Needs no network: links to the documentation of other projects are not resolved.
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


def bulleted(lines: list[str]) -> Iterator[str]:
    """Yield a docstring with its parameters ("name: what it is", further lines indented) as a list."""
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
    """Connect the functions below. Sphinx calls this."""

    def listed(
        _: Any, kind: str, name: str, documented: Any, options: Any, lines: list[str]
    ) -> None:
        lines[:] = bulleted(lines)

    def outside(_: Any, name: str, source: list[str]) -> None:
        # Files outside this folder are not pages of the site: link to them as downloads.
        source[0] = source[0].replace("](../", "](path:../")

    app.connect("autodoc-process-docstring", listed)
    app.connect("source-read", outside)
