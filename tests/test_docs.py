"""Every Python block of the README and the docs runs, top to bottom of its page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, TextDataset

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 of itself
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # Lightning 2.6
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")  # DCP in one process
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(corpus / "parquet", tmp_path / "corpus")
    shutil.copy(corpus / "tokenizer.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, AsyncDataLoader):
                value.shutdown()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_setting_is_documented() -> None:
    import inspect

    page = (ROOT / "docs" / "settings.md").read_text()
    for owner in (TextDataset, AsyncDataLoader):
        for name in inspect.signature(owner).parameters:
            assert name == "dataset" or f"`{name}`" in page, name
