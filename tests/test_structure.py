"""The project's own shape: the public surface, the layers, the house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

SRC = Path(penstock.__file__).parent
MODULES = sorted(SRC.rglob("*.py"))

TIERS = {
    "errors": 0, "types": 0, "config": 1, "values": 1, "dialects": 1, "recipe": 1, "settings": 1, "watch": 1,
    "read": 2, "order": 2, "encode": 2,
    "feed": 3, "lane": 4, "state": 4, "dataset": 5, "sources": 5, "pipeline": 5, "options": 5, "tuning": 5,
    "stats": 6, "torch_dataset": 6, "loader": 6, "stage": 6, "doctor": 6, "verify": 6, "train": 7, "testing": 7, "cli": 7,
}  # fmt: skip


def test_the_public_surface_is_what_it_is() -> None:
    assert sorted(penstock.__all__) == [
        "AccessDenied", "AsyncDataLoader", "BadRecord", "Batch", "ConfigError", "CorruptFile", "FeedStopped", "Heartbeat", "LoaderClosed", "LoaderTimeout",
        "MissingExtra", "Mixture", "NoData", "Offline", "PeerFailed", "PenstockError", "Remote", "RemoteError", "Shard", "SourceChanged", "SourceError", "Span", "StateError",
        "StateFormat", "StateMismatch", "Stats", "SyntheticDataset", "Telemetry", "TextDataset", "TokenFileDataset", "TokenizerError",
        "UnevenRanks", "Warmup", "WorkerDied", "__version__", "analyze_steps", "batched", "prewarm", "verify_prewarm",
        "warmup_loader", "warmup_loader_with_first_batch",
    ]  # fmt: skip
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert dir(penstock) == penstock.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        penstock.nonsense  # noqa: B018


def imports(path: Path) -> set[str]:
    """The parts of penstock that a module imports when it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("penstock.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    part = path.relative_to(SRC).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    for other in imports(path):
        assert TIERS[other] <= TIERS[part], f"{part} imports {other}"


def calls(path: Path) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_threads_sleep_and_the_environment_stay_in_their_places(path: Path) -> None:
    used = calls(path)
    where = path.relative_to(SRC).as_posix()
    if not where.startswith(("feed/", "testing/")):
        assert "threading.Thread" not in used
    if not where.startswith(("cli/", "testing/")):
        assert "time.sleep" not in used
    if where != "config.py":
        assert not used & {"os.environ", "os.getenv", "os.environb"}
    assert "pickle.loads" not in used


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_file_stays_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 420
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_importing_penstock_imports_nothing_heavy() -> None:
    out = run(
        "import penstock, sys; print([m for m in ('numpy', 'pyarrow', 'torch', 'gigatoken', 'rich') if m in sys.modules])"
    )
    assert out.strip() == "[]"


def test_streaming_without_tensors_never_imports_torch(corpus: Path) -> None:
    out = run(
        "import sys; from penstock import *\n"
        f"data = TextDataset({str(corpus / 'parquet')!r}, tokenizer='byte', seq_len=8)\n"
        "with AsyncDataLoader(data, 2, output='numpy') as loader: next(loader)\n"
        "print([m for m in ('torch', 'tokenizers', 'transformers', 'huggingface_hub', 'gigatoken') if m in sys.modules])"
    )
    assert out.strip() == "[]"
