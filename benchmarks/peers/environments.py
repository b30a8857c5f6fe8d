"""An environment for each peer: some pin old libraries, and none may slow another's imports.

Kept from run to run below the benchmarks' folder; the name holds a digest of the packages.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from common import REPO, bench_folder

ALL = ("numpy", "pyarrow", "gigatoken", "awkward", "tokenizers")
NEEDS: dict[str, tuple[str, ...]] = {
    "penstock": (f"{REPO}[hf,tiktoken,torch]",),
    "plain": ("tiktoken", "huggingface_hub"),
    "datasets": ("datasets", "torchdata", "torch"),
    "torch": ("torchdata", "tiktoken", "torch"),
    "grain": ("grain",),
    "spdl": ("spdl-core", "torch"),
    "litdata": ("litdata", "polars", "torch"),
    "datatrove": ("datatrove[io,processing]",),
    "lancedb": ("lancedb", "pylance", "torch"),
    # With all versions given, pip need not search years of releases for half an hour.
    "mosaic": (
        *("mosaicml-streaming==0.13.0", "torch", "numpy==2.1.3", "tokenizers==0.22.2"),
        *("transformers==4.57.6", "huggingface_hub==0.36.2", "google-cloud-storage==3.2.0"),
        *("paramiko==3.5.1", "oci==2.189.0"),
    ),
}
NO_DEPS = {
    # It imports torchvision and needs nothing of it; the newest has no build for the CPU.
    "mosaic": ("torchvision==0.15.2",),
}
"""Installed afterwards, without their dependencies."""
INSTALL_S = 1200.0


class NotInstalled(Exception):
    """pip could not make an environment; the message has its last lines."""


@functools.cache
def python(name: str) -> Path:
    """Return the interpreter of an environment, which is made if it does not exist."""
    needs = (*ALL, *NEEDS[name])
    constraints = REPO / "constraints.txt"
    key = json.dumps([needs, NO_DEPS.get(name), constraints.read_text(), sys.version])
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    folder = bench_folder("environments") / f"{name}-{digest}"
    interpreter, complete = folder / "bin" / "python", folder / "complete"
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not complete.exists():
        print(f"# installing the environment {name}: {' '.join(NEEDS[name])}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], name)
        _run([*pip, "-c", str(constraints), *needs], name)
        if name in NO_DEPS:
            _run([*pip, "--no-deps", *NO_DEPS[name]], name)
        complete.touch()
    elif name == "penstock":  # the code may have changed
        _run([*pip, "--no-deps", "--force-reinstall", str(REPO)], name)
    return interpreter


def versions(name: str) -> dict[str, str]:
    """Return the installed packages of an environment."""
    command = [str(python(name)), "-m", "pip", "list", "--format", "json"]
    listed = _run([*command, "--disable-pip-version-check"], name)
    return {package["name"]: package["version"] for package in json.loads(listed)}


def _run(command: list[str], name: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"the environment {name} took over {INSTALL_S:.0f} s") from error
    if done.returncode:
        raise NotInstalled(f"the environment {name}: " + " / ".join(done.stderr.splitlines()[-3:]))
    return done.stdout
