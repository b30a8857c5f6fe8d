"""The source archive, the wheel, and the package where it is installed."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock

ROOT = Path(__file__).parent.parent
EXTRAS = {
    "all", "buckets", "dev", "docs", "hf", "metrics", "ray", "report", "tensorboard", "tiktoken",
    "torch",
}  # fmt: skip


BUILD = ("-m", "build", "--no-isolation", "--outdir")  # with the libraries that are here


class Built(NamedTuple):
    sdist: Path
    wheel: Path


def do(
    *command: str | Path, cwd: Path, timeout_s: float = 100, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command as in a user's shell, without the paths of this process."""
    own = ("PYTHON", "PENSTOCK_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env |= {"PENSTOCK_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    line = list(map(str, command))
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The archive, and the wheel that is made of it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("built") / "dist"
    do(sys.executable, *BUILD, out, ROOT, cwd=out.parent)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


# The archive


def test_the_archive_has_all_that_git_has(built: Built) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is not a git checkout")
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    with tarfile.open(built.sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped - {"PKG-INFO"} == {name for name in listed if (ROOT / name).exists()}


# The wheel


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    ours = {name for name in names if ".dist-info/" not in name}
    files = (path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.*"))
    assert ours == {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert "penstock/py.typed" in ours


def test_the_wheel_describes_itself(built: Built) -> None:
    wheel, info = zipfile.ZipFile(built.wheel), f"penstock-{penstock.__version__}.dist-info"
    metadata = email.message_from_string(wheel.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("penstock", penstock.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[<>=~!]", line)[0] for line in needed) == [
        "gigatoken", "numpy", "pyarrow", "rich", "typer", "urllib3",
    ]  # fmt: skip
    source = metadata["Project-URL"].removeprefix("Source, ")
    shown = re.sub(f"{source}/(raw|blob)/main/", "", str(metadata.get_payload()))
    assert shown.strip() == (ROOT / "README.md").read_text().strip()
    assert not re.search(r"\]\((?!https:)", str(metadata.get_payload()))  # PyPI has no other files
    assert "penstock = penstock.cli.main:app" in wheel.read(f"{info}/entry_points.txt").decode()
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


# Installed


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, what it needs, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    options = ["--disable-pip-version-check", "--no-input", "--timeout", "15"]
    pip = [programs / "python", "-m", "pip", *options]
    ask = ["download", "--quiet", "--retries", "0", "--no-deps", "urllib3", "--dest"]
    look = [*pip, *ask, folder / "look"]
    seen = subprocess.run(look, capture_output=True, text=True, timeout=100)
    if seen.returncode:
        pytest.skip(f"the package index cannot be reached: {seen.stderr.strip().splitlines()[-1]}")
    do(*pip, "install", "--quiet", built.wheel, cwd=folder, timeout_s=900)
    return programs


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_command_and_loader_work_without_extras(installed: Path, tmp_path: Path) -> None:
    version = do(installed / "penstock", "--version", cwd=tmp_path).stdout
    assert version == f"penstock {penstock.__version__}\n"
    assert "verify-resume" in do(installed / "penstock", "--help", cwd=tmp_path).stdout
    demo = do(installed / "penstock", "demo", cwd=tmp_path, code=1)
    needs = "training needs `torch`, which is not installed: pip install 'penstock[torch]'"
    assert demo.stderr == f"penstock: {needs}\n"
    (tmp_path / "docs.txt").write_text("some text\n" * 1000)
    smoke = do(installed / "penstock", "smoke", "--dataset", "docs.txt", cwd=tmp_path)
    assert smoke.stdout.startswith("[smoke][OK] first batch in ")
    code = (
        "from penstock import AsyncDataLoader, TextDataset\n"
        "data = TextDataset('*.txt', tokenizer='byte', seq_len=15)\n"
        "with AsyncDataLoader(data, batch_size=2, epochs=1, shuffle=True) as loader:\n"
        "    batches = list(loader)\n"
        "print(type(batches[0].inputs).__module__, batches[0].inputs.shape, len(batches) > 300)"
    )
    assert do(installed / "python", "-c", code, cwd=tmp_path).stdout == "numpy (2, 15) True\n"


RIGHT = """
from penstock import AsyncDataLoader, Batch, TextDataset

data = TextDataset("corpus", tokenizer="byte", seq_len=8)
with AsyncDataLoader(data, batch_size=2) as loader:
    for batch in loader:
        reveal_type(batch)
        reveal_type(batch.inputs)
        reveal_type(batch.index)
        reveal_type(loader.state_dict())
        reveal_type(loader.next_batch(timeout=1.0))


def tokens(batch: Batch) -> int:
    return batch.tokens
"""
WRONG = {
    'AsyncDataLoader(data, batch_size="2")': "arg-type",
    "AsyncDataLoader(data, 2, batchsize=2)": "call-arg",
    "AsyncDataLoader(data, 2).nextbatch()": "attr-defined",
    'TextDataset("corpus", tokenizer="byte", seq_len=None)': "arg-type",
    "TextDataset().files": "call-arg",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_code_of_a_user_is_checked_against_the_types(installed: Path, tmp_path: Path) -> None:
    checker = [sys.executable, "-m", "mypy", "--strict"]
    checker += ["--python-executable", str(installed / "python")]
    checker += ["--config-file", os.devnull, "--cache-dir", str(tmp_path / "cache")]
    (tmp_path / "right.py").write_text(RIGHT)
    good = do(*checker, "right.py", cwd=tmp_path, timeout_s=600)
    shown = re.findall(r'Revealed type is "(.*)"', good.stdout)
    assert [re.sub(r"builtins\.|typing\.|penstock\.encode\.batch\.", "", each) for each in shown] == [
        "Batch", "Any", "int", "dict[str, Any]", "Batch | None",
    ]  # fmt: skip
    head = RIGHT.partition("with")[0]
    (tmp_path / "wrong.py").write_text(head + "\n".join(WRONG) + "\n")
    bad = do(*checker, "wrong.py", cwd=tmp_path, timeout_s=600, code=1)
    first = head.count("\n") + 1
    found = {
        int(line): code
        for line, code in re.findall(r"^wrong\.py:(\d+): error: .*\[([a-z-]+)\]$", bad.stdout, re.M)
    }
    assert found == {first + number: code for number, code in enumerate(WRONG.values())}, bad.stdout
