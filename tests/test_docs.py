"""The README and the pages: their code and commands run, their messages exist, the site builds."""

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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import penstock
from penstock import AsyncDataLoader
from penstock.settings import load
from tests.faults.serving import documents, parquet
from tests.recorded import Recording, write_run
from tests.servers import HubServer
from tests.train.runs import ROOT, environment

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
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
    found = []
    for each in FENCE.finditer(page.read_text()):
        prompt = not each["language"] and each["text"].startswith("$ ")
        found.append(
            Block("console" if prompt else each["language"], each["text"], each["mark"] or "")
        )
    return [block for block in found if not languages or block.language in languages]


def pages_with(*languages: str) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, *languages)]


# Python

NOT_RUN = {"not run: streaming": "streaming", "not run: litdata": "litdata"}
"""Marks of blocks that need a library which the tests do not install: they are compiled, not run."""
TORCHRUN = "run by torchrun"
"""Mark of a script for several ranks: tests/distributed/test_integrations.py runs it."""


@pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning"
)  # torchdata 0.11 of itself
@pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)  # Lightning 2.6
@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable:UserWarning"
)  # DCP in one process
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
            if block.mark not in {*NOT_RUN, TORCHRUN}:
                exec(code, names)
    finally:
        for value in names.values():
            if isinstance(value, AsyncDataLoader):
                value.shutdown()


def test_only_blocks_that_need_a_missing_library_are_not_run() -> None:
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "dev"
    ]
    for page in PAGES:
        for block in blocks(page, "python"):
            assert block.mark in {*NOT_RUN, TORCHRUN, ""}, f"{page.name}: {block.mark}"
            if block.mark in NOT_RUN:
                imported = {
                    n.module
                    for n in ast.walk(ast.parse(block.text))
                    if isinstance(n, ast.ImportFrom)
                }
                assert NOT_RUN[block.mark] in imported
                assert not any(NOT_RUN[block.mark] in requirement for requirement in dev)


# Commands

ELSEWHERE = {
    "make bench-peers": "most of an hour",
    "python benchmarks/peers --only Grain SPDL": "some of that hour",
    "python benchmarks/peers --parts drain resume --repeats 5": "some of that hour",
    "python benchmarks/peers --quick": "tests/test_peers.py::test_the_benchmark_installs_environments_runs_and_writes_its_page",
    "make demo": "tests/test_cli.py::test_the_demo_trains_is_killed_resumes_and_reports",
    "make test": "it is what runs this",
    "penstock watch": "tests/test_watch.py::test_on_a_terminal_it_follows_the_run_and_the_size_and_ctrl_c_leaves_it_in_order",
    "penstock watch /runs/7 --total-tokens 1e10": "tests/test_watch.py::test_without_a_terminal_it_waits_for_the_run_and_ends_with_it",
    "penstock watch /runs/7 --metrics-port 9464 > watch.log": "tests/test_watch.py::test_it_serves_the_metrics_of_the_run_beside_it",
    "torchrun --nproc_per_node=2 ddp.py": "tests/distributed/test_integrations.py::test_the_ddp_recipe_resumes_on_another_number_of_ranks",
    "torchrun --nproc_per_node=1 ddp.py": "tests/distributed/test_integrations.py::test_the_ddp_recipe_resumes_on_another_number_of_ranks",
    "torchrun --nproc_per_node=8 scripts/train_showcase.py --dataset fineweb_edu": "eight ranks: tests/distributed has two",
    "torchrun --nproc_per_node=8 scripts/train_showcase_fsdp.py --dataset fineweb_edu": "eight ranks: tests/distributed has two",
    "penstock train --dataset fineweb_edu --dataset-config sample-10BT --tokenizer gpt2 --size small --seq-len 1024 --steps 1000": "hours without a GPU",
    "penstock train --dataset s3://bucket/corpus/*.parquet --config run.toml": "tests/test_buckets.py::test_a_stream_from_a_bucket_is_that_of_a_local_copy_and_stays",
    "python scripts/automation/fwe_smoke.py --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte": "tests/train/test_commands.py::test_the_smoke_test_passes",
    "penstock bootstrap --out /data/fwe_bootstrap.jsonl --bytes 10GB --refresh --background": "tests/test_bootstrap.py::test_the_background_goes_on_by_itself",
}  # fmt: skip
"""Commands that are not run here: the test that runs them, or the reason. All others are run."""

QUICK = ("README", "quickstart", "reference", "migrating")
"""Pages whose commands run in `make test`; those of other pages run in `make test-slow`."""
SLOW = {
    "penstock train --dataset stdlib --steps 100 --report",
    "penstock doctor run.toml --tokens-per-second 2e6",
    "penstock doctor run.toml --tokens-per-second 2000000",
    "penstock doctor stdlib --tokens-per-second 2000000",
    "penstock doctor run.toml --trace trace.json",
    "penstock doctor hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT --tokenizer gpt2 --tokens-per-second 2000000",
    "penstock verify-resume hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT --tokenizer gpt2 --set shuffle=true",
    "penstock verify-resume stdlib --points 3 --set shuffle=true",
}
"""Commands that take more than a few seconds."""

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


class Command(NamedTuple):
    """A command line, and the output that the page shows."""

    line: str
    shown: list[str]

    @property
    def name(self) -> str:
        """The line without quotes and comment."""
        return " ".join(shlex.split(self.line, comments=True))

    @property
    def exits(self) -> tuple[int, ...]:
        """The exit codes that are accepted. For the doctor, that includes a machine that is too slow."""
        if "doctor" in self.name:
            return 0, 1
        if any("No such option" in line for line in self.shown):
            return (2,)
        return (1,) if any(line.startswith("penstock: ") for line in self.shown) else (0,)


def commands(page: Path) -> list[Command]:
    found: list[Command] = []
    for block in blocks(page, "bash", "console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language == "bash" and line.strip():
                found.append(Command(line, []))
            elif line.startswith("$ "):
                found.append(Command(line.removeprefix("$ "), []))
            elif block.language == "console":
                found[-1].shown.append(line)
    return [command for command in found if not command.name.startswith("pip install")]


def chosen(slow: bool) -> list[Any]:
    """Return the commands to run, each once."""
    each = {
        command.name: (page, command)
        for page in reversed(PAGES)
        for command in reversed(commands(page))
    }
    return [
        pytest.param(command, id=f"{page.stem}: {name}")
        for name, (page, command) in sorted(each.items(), key=lambda item: item[1][0])
        if name not in ELSEWHERE and (name in SLOW or page.stem not in QUICK) == slow
    ]


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    texts = documents()
    folders = ("data", "sample/10BT")
    files = {
        f"{folder}/{n:03}.parquet": parquet(texts[n::3]) for folder in folders for n in range(3)
    }
    content = "".join(json.dumps({"content": text}) + "\n" for text in texts)
    with HubServer() as hub:
        hub.add("HuggingFaceFW/fineweb-edu", files, card=CARD)
        hub.add("org/name", {"data/docs.jsonl": content.encode()})
        yield hub


def prepare(folder: Path, corpus: Path) -> Path:
    """Make a project as a reader may have one: text, a vocabulary, settings and recorded runs."""
    shutil.copytree(corpus / "parquet", folder / "corpus")
    shutil.copy(corpus / "tokenizer.json", folder)
    (folder / "run.toml").write_text(SETTINGS)
    for name in ("scripts", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for number, name in enumerate(("artifacts/train_showcase", "runs/7", "runs/8")):
        write_run(folder / name, Recording(ranks=2, seed=number))
    # A vocabulary that was downloaded before.
    known = folder / "home" / "hub" / "models--gpt2"
    (known / "refs").mkdir(parents=True)
    (known / "refs" / "main").write_text("0" * 40)
    (known / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(corpus / "tokenizer.json", known / "snapshots" / ("0" * 40))
    return folder


def run(command: Command, folder: Path, hub: HubServer) -> None:
    """Run a line as it is typed at a prompt."""
    variables = environment(
        folder / "cache", HF_ENDPOINT=hub.endpoint, HF_HOME=str(folder / "home")
    )
    line = command.line.replace(" /data/", f" {folder}/data/")
    if line.startswith("export "):
        line += "; penstock config run.toml"  # which refuses what it does not know
    shell = ["/bin/sh", "-c", line]
    done = subprocess.run(
        shell, cwd=folder, env=variables, capture_output=True, text=True, timeout=1000
    )
    said = [each.rstrip() for each in (done.stdout + done.stderr).splitlines()]
    assert done.returncode in command.exits, said
    if "penstock config" in command.name:  # says the same on every machine
        assert {"…", *said} >= set(command.shown)


@pytest.mark.parametrize("command", chosen(slow=False))
def test_a_command_of_a_page_runs(
    command: Command, corpus: Path, hub: HubServer, tmp_path: Path
) -> None:
    run(command, prepare(tmp_path, corpus), hub)


@pytest.mark.slow
@pytest.mark.parametrize("command", chosen(slow=True))
def test_a_long_command_of_a_page_runs(
    command: Command, corpus: Path, hub: HubServer, tmp_path: Path
) -> None:
    run(command, prepare(tmp_path, corpus), hub)


def test_every_listed_command_is_on_a_page_and_every_named_test_exists() -> None:
    written = {command.name for page in PAGES for command in commands(page)}
    assert ELSEWHERE.keys() | SLOW <= written
    for where in ELSEWHERE.values():
        path, found, name = where.partition("::")
        assert not found or f"\ndef {name}(" in (ROOT / path).read_text(), where


def test_commands_are_in_blocks_that_are_run() -> None:
    known = {
        "",
        "python",
        "bash",
        "console",
        "text",
        "toml",
        "json",
        "yaml",
        "{toctree}",
        "{contents}",
        "{eval-rst}",
    }
    looks_like_one = re.compile(
        r"^(\$ |(penstock|python|pip|make|torchrun|export) [a-z-])", re.MULTILINE
    )
    for page in PAGES:
        for block in blocks(page):
            assert block.language in known, f"{page.name}: ```{block.language}"
            if block.language in ("", "text"):
                assert not looks_like_one.search(block.text), f"{page.name}:\n{block.text}"


def test_extras_that_pages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        name
        for page in PAGES
        for found in re.findall(r"penstock\[([a-z,]+)\]", page.read_text())
        for name in found.split(",")
    }
    assert named
    assert named <= extras.keys()


# Settings


@pytest.mark.parametrize("page", pages_with("toml", "json", "yaml"))
def test_settings_of_a_page_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "toml", "json", "yaml"):
        if block.language == "yaml":  # for others to read
            assert yaml.safe_load(block.text)
            continue
        path = tmp_path / f"run.{block.language}"
        path.write_text(block.text)
        resolved = load(path)
        assert (
            any(source.startswith("file ") for source in resolved.sources.values()) or resolved.data
        )


def test_the_option_tables_derive_from_the_options() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["page"]
    written = (ROOT / "docs" / "reference.md").read_text()
    assert page(written) == written, "run docs/make_settings.py"


# Messages


@cache
def messages() -> list[tuple[re.Pattern[str], int]]:
    """Return every text in the source as a pattern, and how many of its characters are fixed."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else None for v in node.values]
            elif isinstance(node, ast.Constant) and isinstance(
                node.value, str
            ):  # perhaps with places for a logger
                parts = [
                    None if part.startswith("%") else part
                    for part in re.split(r"(%[.0-9]*[a-z])", node.value)
                ]
            else:
                continue
            fixed = sum(len(part) for part in parts if part)
            if fixed >= 15:
                pattern = "".join(".*" if part is None else re.escape(part) for part in parts)
                found.append((re.compile(pattern, re.DOTALL), fixed))
    return found


def test_every_message_that_is_explained_exists_in_the_source() -> None:
    quoted = [
        line
        for block in blocks(ROOT / "docs" / "migrating.md", "text")
        for line in block.text.splitlines()
    ]
    assert len(quoted) > 20
    for line in quoted:
        assert any(
            fixed * 5 >= len(line) and pattern.fullmatch(line) for pattern, fixed in messages()
        ), line


def test_every_advice_is_explained() -> None:
    from penstock.watch.attribution import Known, advise
    from penstock.watch.stage_timer import STAGES

    page = (ROOT / "docs" / "migrating.md").read_text()
    for stage in (*STAGES, "ranks"):
        for known in (
            Known(n_workers=2, cores=4, remote=True, fetches=16), Known(n_workers=2, cores=2, remote=True, link_bound=True),
            Known(n_workers=2, cores=2), Known(n_workers=2, cores=2, tight=True), Known(), Known(n_workers=2, cores=2, python=True),
        ):  # fmt: skip
            first = re.split(r":|, or| →|=", advise(stage, known))[0]
            assert first in page, first


# Links, and the whole


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+\.md)", (ROOT / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    flags = re.search(r"-m sphinx (.*) docs artifacts/docs", (ROOT / "Makefile").read_text())
    assert flags is not None
    line = [sys.executable, "-m", "sphinx", *flags[1].split(), ROOT / "docs", out]
    done = subprocess.run(line, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_can_be_reached_from_the_index(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists()
        assert page.stem == "index" or f'href="{page.stem}.html"' in index, page.name


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = (site / "reference.html").read_text()
    for name in penstock.__all__:
        assert f'id="penstock.{name}"' in page, name


def test_pages_load_nothing_from_a_network(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"|<link[^>]*\shref="([^"]+)"',
            page.read_text(),
        )
        assert not [url for pair in loaded for url in pair if "//" in url], page.name
