"""An environment for each peer: some pin old libraries, and none shall slow another's imports.

In:    the packages that a peer needs, beside what all need (numpy, pyarrow, gigatoken, `tokenizers`).
Out:   a Python interpreter that has them, and their versions. What cannot be installed is a reason, not the end.
Where: folders below the benchmarks' own, kept from run to run; the name holds a digest of the packages.
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
    "penstock": (f"{REPO}[hf,tiktoken,torch]", "matplotlib"),
    "plain": ("tiktoken", "huggingface_hub"),
    "datasets": ("datasets", "torchdata", "torch"),
    "torch": ("torchdata", "tiktoken", "torch"),
    "grain": ("grain",),
    "spdl": ("spdl-core", "torch"),
    "litdata": ("litdata", "polars", "torch"),
    # Named, so that pip need not try: without them it looks through years of releases for half an hour.
    "mosaic": (
        "mosaicml-streaming==0.13.0",
        "torch",
        "numpy==2.1.3",
        "transformers==4.57.6",
        "tokenizers==0.22.2",
        "huggingface_hub==0.36.2",
        "google-cloud-storage==3.2.0",
        "paramiko==3.5.1",
        "oci==2.189.0",
    ),
}
ALONE: dict[str, tuple[str, ...]] = {
    # It imports torchvision and needs nothing of it; the newest has no build for the CPU, and fails to load.
    "mosaic": ("torchvision==0.15.2",),
}
"""Installed afterwards, without what they say that they need."""
INSTALL_S = 1200.0
LAST_LINES = 3


class NotInstalled(Exception):
    """pip could not make an environment; the message has its last words."""


@functools.cache
def python(name: str) -> Path:
    """The interpreter of an environment, which is made if it is not there."""
    needs = (*ALL, *NEEDS[name])
    constraints = REPO / "constraints.txt"
    told = json.dumps([needs, ALONE.get(name), constraints.read_text(), sys.version, str(REPO)])
    folder = (
        bench_folder("environments") / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:10]}"
    )
    interpreter, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        print(f"# installing the environment {name}: {' '.join(NEEDS[name])}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], name)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "-c", str(constraints), *needs], name)
        if name in ALONE:
            _run([*pip, "--no-deps", *ALONE[name]], name)
        complete.touch()
    elif name == "penstock":  # what is measured is the code as it is now
        _run([str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
              "--no-deps", "--force-reinstall", str(REPO)], name)  # fmt: skip
    return interpreter


def versions(name: str) -> dict[str, str]:
    """What is installed there."""
    listed = _run(
        [str(python(name)), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        name,
    )
    return {package["name"]: package["version"] for package in json.loads(listed)}


def _run(command: list[str], name: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=True
        )
    except subprocess.CalledProcessError as error:
        words = " / ".join(error.stderr.strip().splitlines()[-LAST_LINES:])
        raise NotInstalled(f"the environment {name} could not be made: {words}") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(
            f"the environment {name} was not made within {INSTALL_S:.0f} s"
        ) from error
    return done.stdout
