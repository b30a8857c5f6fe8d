"""The README and the pages: code and commands run, quoted messages exist, the site builds."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import penstock
from penstock import AsyncDataLoader
from penstock.settings import load
from penstock.watch.attribution import Known, advise
from penstock.watch.stage_timer import STAGES
from tests.faults.serving import documents, parquet
from tests.recorded import Recording, write_run
from tests.servers import HubServer
from tests.train.runs import ROOT, environment

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *DOCS]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code, and the comment right above it."""

    language: str
    text: str
    mark: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of a page in these languages, or all of them."""
    found = FENCE.finditer(page.read_text())
    every = [Block(each["language"], each["text"], each["mark"] or "") for each in found]
    return [block for block in every if not languages or block.language in languages]


def pages_with(*languages: str) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, *languages)]


# Python

TORCHRUN = "run by torchrun"
"""Mark of a script for several ranks: tests/distributed/test_integrations.py runs it."""
IF_INSTALLED = ("run if installed: trl", "run if installed: torchtitan")
"""Marks of recipes that tests/test_integrations.py runs if the library is installed."""
NOT_RUN = (TORCHRUN, *IF_INSTALLED, "not run: streaming", "not run: litdata")
"""Marks of blocks that are only compiled: the tests do not install these libraries."""


# Warnings of torchdata 0.11, of Lightning 2.6, of DCP in one process, and of flex attention.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("page", pages_with("python"))
def test_the_code_of_a_page_runs(
    page: Path, corpus: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    # Read once, when `datasets` is imported: a place that lasts as long as the process.
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path.parent / "datasets"))
    shutil.copytree(corpus / "parquet", tmp_path / "corpus")
    shutil.copy(corpus / "tokenizer.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        for number, block in enumerate(blocks(page, "python")):
            code = compile(block.text, f"{page.name}, block {number}", "exec")
            assert block.mark in ("", *NOT_RUN)
            if not block.mark:
                exec(code, names)
    finally:
        for value in names.values():
            if isinstance(value, AsyncDataLoader):
                value.shutdown()


# Commands

ELSEWHERE = {
    "make bench-peers": "most of an hour",
    "python benchmarks/peers --only Grain SPDL": "some of that hour",
    "python benchmarks/peers --parts drain resume --repeats 5": "some of that hour",
    "python benchmarks/peers --quick": "tests/test_peers.py::test_the_benchmark_installs_environments_runs_and_writes_its_page",
    "make demo": "tests/test_cli.py::test_the_demo_trains_is_killed_resumes_and_reports",
    "make test": "it is what runs this",
    "make check": "CI runs it",
    "make docs": "tests/test_docs.py::test_the_site_builds_without_a_warning_and_needs_no_network",
    "penstock watch": "tests/test_watch.py::test_on_a_terminal_it_follows_the_run_and_the_size_and_ctrl_c_leaves_it_in_order",
    "penstock watch /runs/7 --total-tokens 1e10": "tests/test_watch.py::test_without_a_terminal_it_waits_for_the_run_and_ends_with_it",
    "penstock watch /runs/7 --metrics-port 9464 > watch.log": "tests/test_watch.py::test_it_serves_the_metrics_of_the_run_beside_it",
    "torchrun --nproc_per_node=2 ddp.py": "tests/distributed/test_integrations.py::test_the_ddp_recipe_resumes_on_another_number_of_ranks",
    "torchrun --nproc_per_node=1 ddp.py": "tests/distributed/test_integrations.py::test_the_ddp_recipe_resumes_on_another_number_of_ranks",
    "torchrun --nproc_per_node=8 scripts/train_showcase.py --dataset fineweb_edu": "eight ranks: tests/distributed has two",
    "torchrun --nproc_per_node=8 scripts/train_showcase_fsdp.py --dataset fineweb_edu": "eight ranks: tests/distributed has two",
    "penstock train --dataset fineweb_edu --dataset-config sample-10BT --tokenizer gpt2 --size small --seq-len 1024 --steps 1000": "hours without a GPU",
    "penstock train --dataset s3://bucket/corpus/*.parquet --config run.toml": "tests/test_buckets.py::test_training_on_a_bucket_stops_and_resumes_as_on_a_local_copy",
    "python scripts/automation/fwe_smoke.py --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte": "tests/train/test_commands.py::test_the_smoke_test_passes",
    "penstock bootstrap --out /data/fwe_bootstrap.jsonl --bytes 10GB --refresh --background": "tests/test_bootstrap.py::test_the_background_goes_on_by_itself",
}  # fmt: skip
"""Commands that are not run here: the test that runs them, or the reason. All others are run."""
QUICK = ("README", "quickstart", "reference", "migrating")
"""Pages whose commands run in `make test`; those of other pages run in `make test-slow`."""
LONG = ("--tokens-per-second", "--steps")
"""Options of commands that take more than a few seconds: always in `make test-slow`."""

CARD = """---
configs:
- config_name: default
  data_files: data/*.parquet
- config_name: sample-10BT
  data_files: sample/10BT/*
---
"""
SETTINGS = """
[loader]
batch_size = 4
shuffle = true

[data]
kind = "text"
urls = "corpus"
tokenizer = "tokenizer.json"
seq_len = 64
cache = true
"""


def commands() -> dict[str, tuple[Path, str, list[str]]]:
    """Return the page, the line and the shown output of every command, by its text without quotes
    and comment."""
    found: dict[str, tuple[Path, str, list[str]]] = {}
    shown: list[str] = []
    for page in PAGES:
        for block in blocks(page, "bash", "console"):
            for line in block.text.splitlines():
                if block.language == "bash" or line.startswith("$ "):
                    line, shown = line.removeprefix("$ "), []
                    name = " ".join(shlex.split(line, comments=True))
                    if name and not name.startswith("pip install"):
                        found.setdefault(name, (page, line, shown))
                else:
                    shown.append(line)
    return found


def to_run() -> Iterator[Any]:
    for name, (page, line, shown) in commands().items():
        if name not in ELSEWHERE:
            slow = page.stem not in QUICK or any(option in name for option in LONG)
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(line, shown, id=f"{page.stem}: {name}", marks=marks)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    texts = documents()
    folders = ("data", "sample/10BT")
    files = {f"{at}/{n:03}.parquet": parquet(texts[n::3]) for at in folders for n in range(3)}
    content = "".join(json.dumps({"content": text}) + "\n" for text in texts)
    with HubServer() as hub:
        hub.add("HuggingFaceFW/fineweb-edu", files, card=CARD)
        hub.add("org/name", {"data/docs.jsonl": content.encode()})
        yield hub


@pytest.fixture
def project(tmp_path: Path, corpus: Path) -> Path:
    """A folder as a reader may have one: text, a vocabulary, settings and recorded runs."""
    shutil.copytree(corpus / "parquet", tmp_path / "corpus")
    shutil.copy(corpus / "tokenizer.json", tmp_path)
    (tmp_path / "run.toml").write_text(SETTINGS)
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for number, name in enumerate(("artifacts/train_showcase", "runs/7", "runs/8")):
        write_run(tmp_path / name, Recording(ranks=2, seed=number))
    # A vocabulary that was downloaded before.
    known = tmp_path / "home" / "hub" / "models--gpt2"
    (known / "refs").mkdir(parents=True)
    (known / "refs" / "main").write_text("0" * 40)
    (known / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(corpus / "tokenizer.json", known / "snapshots" / ("0" * 40))
    return tmp_path


@pytest.mark.parametrize(("line", "shown"), list(to_run()))
def test_a_command_of_a_page_runs(
    line: str, shown: list[str], project: Path, hub: HubServer
) -> None:
    variables = environment(
        project / "cache", HF_ENDPOINT=hub.endpoint, HF_HOME=str(project / "home")
    )
    shell = line.replace(" /data/", f" {project}/data/")
    if line.startswith("export "):
        shell += "; penstock config run.toml"  # which refuses what it does not know
    done = subprocess.run(
        ["/bin/sh", "-c", shell], cwd=project, env=variables, capture_output=True, text=True, timeout=1000
    )  # fmt: skip
    output = [each.rstrip() for each in (done.stdout + done.stderr).splitlines()]
    fails = any(each.startswith("penstock: ") for each in shown)
    slow_machine = "doctor" in line and done.returncode == 1
    assert done.returncode == int(fails) or slow_machine, output
    if "penstock config" in line:  # shows the same on every machine
        assert {"…", *output} >= set(shown)


def test_every_command_that_runs_elsewhere_is_on_a_page_and_its_test_exists() -> None:
    assert ELSEWHERE.keys() <= commands().keys()
    for where in ELSEWHERE.values():
        path, found, name = where.partition("::")
        assert not found or f"\ndef {name}(" in (ROOT / path).read_text(), where


def test_commands_are_in_blocks_that_are_run() -> None:
    run = {"python", "bash", "console", "toml", "json", "yaml"}
    shown = {"", "text", "{toctree}", "{contents}", "{eval-rst}"}
    command = re.compile(r"^(\$ |(penstock|python|pip|make|torchrun|export) [a-z-])", re.MULTILINE)
    for page in PAGES:
        for block in blocks(page):
            assert block.language in run | shown, f"{page.name}: ```{block.language}"
            assert block.language in run or not command.search(block.text), f"{page.name}: {block}"


def test_extras_that_pages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(page.read_text() for page in PAGES)
    named = {name for found in re.findall(r"penstock\[([a-z,]+)\]", text) for name in found.split(",")}  # fmt: skip
    assert {"hf"} < named <= project["optional-dependencies"].keys()


# Settings


@pytest.mark.parametrize("page", pages_with("toml", "json", "yaml"))
def test_settings_of_a_page_are_accepted(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml", "json", "yaml"):
        if block.language == "yaml":  # rules for Prometheus
            assert yaml.safe_load(block.text)
            continue
        path = tmp_path / f"run.{block.language}"
        path.write_text(block.text)
        found = load(path)
        assert found.data or any(source.startswith("file ") for source in found.sources.values())


def test_the_option_tables_derive_from_the_options() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["page"]
    written = (ROOT / "docs" / "reference.md").read_text()
    assert page(written) == written, "run docs/make_settings.py"


# Messages


def messages() -> Iterator[tuple[re.Pattern[str], int]]:
    """Yield every text in the source as a pattern, and how many of its characters are fixed."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else None for v in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = re.split(r"%[.0-9]*[a-z]", node.value)  # a logger's placeholders
                parts = [part for text in parts for part in (text, None)][:-1]
            else:
                continue
            fixed = sum(len(str(part)) for part in parts if part)
            if fixed >= 15:
                pattern = "".join(".*" if part is None else re.escape(str(part)) for part in parts)
                yield re.compile(pattern, re.DOTALL), fixed


def test_every_message_that_is_explained_exists_in_the_source() -> None:
    known = list(messages())
    found = blocks(ROOT / "docs" / "migrating.md", "text")
    quoted = [line for block in found for line in block.text.splitlines()]
    assert len(quoted) > 20
    for line in quoted:
        assert any(fixed * 5 >= len(line) and each.fullmatch(line) for each, fixed in known), line


def test_every_advice_is_explained() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    for known in (
        Known(),
        Known(n_workers=2, cores=4, remote=True, fetches=16),
        Known(n_workers=2, cores=2, remote=True, link_bound=True),
        Known(n_workers=2, cores=2),
        Known(n_workers=2, cores=2, tight=True),
        Known(n_workers=2, cores=2, python=True),
    ):
        for stage in (*STAGES, "ranks"):
            first = re.split(r":|, or| →|=", advise(stage, known))[0]
            assert first in page, first


# Links, and the whole


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+\.md)", (ROOT / "README.md").read_text()))
    assert {page.name for page in DOCS} - {"index.md"} <= linked


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    line = re.search(r"-m sphinx (.*) docs artifacts/docs", (ROOT / "Makefile").read_text())
    assert line is not None
    flags = line[1].split()
    build = [sys.executable, "-m", "sphinx", *flags, ROOT / "docs", tmp_path]
    done = subprocess.run(build, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference.html").read_text()
    for name in penstock.__all__:
        assert f'id="penstock.{name}"' in reference, name
    loaded = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="[^"]*//|<link[^>]*\shref="[^"]*//')
    for page in tmp_path.glob("*.html"):
        assert not loaded.search(page.read_text()), page.name
