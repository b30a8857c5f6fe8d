"""The project's own shape: the public surface, the layers, the house rules that a machine can check."""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.prepare import prepare
from tests.corpus import train_vocabulary

SRC = Path(penstock.__file__).parent
ROOT = SRC.parent.parent
MODULES = sorted(SRC.rglob("*.py"))
AROUND = sorted(
    path for folder in ("benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")
)

TIERS = {
    "errors": 0, "types": 0, "options": 1, "config": 1, "watch": 1, "read": 2, "order": 2, "encode": 2,
    "feed": 3, "state": 4, "dataset": 5, "sources": 5, "prepare": 5, "pipeline": 5, "settings": 5,
    "torch_dataset": 6, "loader": 6, "tools": 6, "train": 7, "cli": 7,
}  # fmt: skip


def where(path: Path) -> str:
    return path.relative_to(SRC if path.is_relative_to(SRC) else ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# The surface


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == [
        "AsyncDataLoader", "Batch", "ConfigError", "Heartbeat", "Mixture", "PenstockError", "PreparedDataset", "RemoteOptions", "Shard",
        "Span", "StateError", "Stats", "SyntheticDataset", "Telemetry", "TextDataset", "TokenFileDataset", "__version__",
        "analyze_steps", "prewarm", "warmup_loader", "warmup_loader_with_first_batch",
    ]  # fmt: skip
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert dir(penstock) == sorted(penstock.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        penstock.nonsense  # noqa: B018


# The layers


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The parts of penstock that these statements import."""
    found = set()
    for node in nodes:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("penstock.")}
        if isinstance(node, ast.ImportFrom) and node.module == "penstock":
            found |= {alias.name for alias in node.names if alias.name in TIERS}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_imports_point_one_way_also_within_functions() -> None:
    for path in MODULES:
        for other in imported(ast.walk(tree(path))) if part_of(path) != "__init__" else ():
            runs = TIERS[other] <= TIERS[part_of(path)]
            assert runs or other in for_types(path), f"{where(path)} imports {other}"


def for_types(path: Path) -> set[str]:
    """The parts that a module imports for a type checker only."""
    blocks = [node for node in tree(path).body if isinstance(node, ast.If)]
    return imported(inner for node in blocks for inner in ast.walk(node))


# The house rules


def test_threads_sleep_print_and_the_environment_stay_in_their_places() -> None:
    for path in MODULES:
        nodes = (n for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute | ast.Name))
        used = set(map(ast.unparse, nodes))
        if not where(path).startswith("feed/"):
            assert "threading.Thread" not in used, where(path)
        if not where(path).startswith("cli/"):
            assert "time.sleep" not in used, where(path)
        if where(path) != "config.py":
            assert not used & {"os.environ", "os.getenv", "os.environb"}, where(path)
        if not where(path).startswith("cli/") and where(path) != "train/run.py":
            assert "print" not in used, where(path)
        if where(path) != "feed/process_pool.py":  # what this process sends to its own workers
            assert "pickle.loads" not in used, where(path)


def comments(path: Path) -> set[int]:
    """The lines that have a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds
    )


def swallowed(path: Path) -> Iterator[int]:
    """Lines where any exception is caught and neither raised, used nor commented on."""
    said = comments(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler) and catches_all(node):
            inside = [inner for statement in node.body for inner in ast.walk(statement)]
            raised = any(isinstance(inner, ast.Raise) for inner in inside)
            used = any(isinstance(inner, ast.Name) and inner.id == node.name for inner in inside)
            reason = said & set(range(node.lineno, (node.body[-1].end_lineno or 0) + 1))
            if node.type is None or not (raised or used or reason):
                yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            kinds = {ast.unparse(kind) for kind in node.args}
            if kinds & {"Exception", "BaseException"} and node.lineno not in said:
                yield node.lineno


def test_nothing_is_swallowed_without_a_reason() -> None:
    assert not [where(path) for path in MODULES + AROUND if list(swallowed(path))]


WAITS = {"wait", "join", "get", "acquire", "communicate", "recv", "accept"}
UNBOUNDED = {
    "feed/autotune.py: knob.get()": "reads a value",
    "feed/autotune.py: self.get()": "reads a value",
    "feed/autotune.py: trial.knob.get()": "reads a value",
    "feed/process_pool.py: self._idle.get()": "there is a process for each thread that asks",
    "feed/process_pool.py: self.process.join()": "a process that was just killed",
    "feed/worker_pool.py: self._changed.wait()": "an idle worker; stop() wakes it",
    "feed/warmup.py: self._thread.join()": "a thread that has handed over its last",
}


def without_a_deadline(path: Path) -> Iterator[str]:
    """Calls that wait until something happens."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), {word.arg for word in node.keywords}
        if name.rpartition(".")[2] in WAITS and "." in name and not node.args and not words:
            yield f"{where(path)}: {ast.unparse(node)}"
        if name in ("subprocess.run", "subprocess.check_output") and "timeout" not in words:
            yield f"{where(path)}: {name}"


def test_waits_have_a_deadline() -> None:
    assert {call for path in MODULES for call in without_a_deadline(path)} == UNBOUNDED.keys()


# What is imported


TEXT = """
data = penstock.TextDataset({path!r}, tokenizer="byte", seq_len=8)
with penstock.AsyncDataLoader(data, 2) as loader:
    loader.warmup(2)
"""
WORDS = TEXT.replace('"byte"', "{vocabulary!r}")
PREPARED = TEXT.replace('TextDataset({path!r}, tokenizer="byte"', "PreparedDataset({prepared!r}")
SLOW = {"pandas", "importlib.metadata", "awkward"}


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("", {"numpy", "pyarrow", "torch", "gigatoken", "rich"}),
        (TEXT, {"torch", "tokenizers", "transformers", "huggingface_hub", "gigatoken"}),
        (WORDS, SLOW | {"pyarrow.compute"}),
        (PREPARED, SLOW),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(
    code: str, unwanted: set[str], corpus: Path, tmp_path: Path
) -> None:
    path, out = str(corpus / "parquet"), str(tmp_path / "prepared")
    vocabulary = str(train_vocabulary(tmp_path / "tokenizer.json"))
    if code == PREPARED:
        prepare(path, tokenizer="byte", out=out)
    code = code.format(path=path, vocabulary=vocabulary, prepared=out)
    command = [sys.executable, "-c", f"import penstock, sys\n{code}\nprint(*sys.modules)"]
    imported = subprocess.check_output(command, text=True, timeout=60)
    assert not unwanted & set(imported.split())
