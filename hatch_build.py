"""Make the links of the README absolute in the package's metadata, because PyPI shows it alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AbsoluteLinks(MetadataHookInterface):
    """Replaces relative links by addresses below `Source` of `[project.urls]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata["urls"]["Source"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^\]]*\])\((?!\w+:)", rf"\1({source}/raw/main/", text)
        text = re.sub(r"\]\((?!\w+:|#)", f"]({source}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
