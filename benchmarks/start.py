"""How long is it from the start of the process to the first batch?

Fresh processes, one after the other in turn. The clock starts just before the process is created
and is read by the child (the monotonic clock is the same for all processes), so the interpreter's
own start counts, and its exit does not. Files are in the page cache and byte code is compiled: each
child has run once before. Importing torch takes longer than everything else together, whoever does
it, so it is shown beside; a loader that is started first works while torch is imported. awkward,
which gigatoken takes its text through, is imported with the first chunk, and is shown beside too.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from common import BATCH_SIZE, COPIES, SEQ_LEN, parser
from corpora import load_corpus
from record import Goal, Report
from rounds import interleave

FRAME = """
import time
marks = [("interpreter", time.monotonic_ns())]
def mark(part):
    marks.append((part, time.monotonic_ns()))
{body}
import json
print(json.dumps(marks))
"""
IMPORT = """
import penstock
mark("import penstock")
"""
NAMES = """
import numpy
mark("import numpy")
import pyarrow
mark("import pyarrow")
from penstock import AsyncDataLoader, TextDataset
mark("rest of the names")
"""
FIRST = """
data = TextDataset({folder!r}, tokenizer={tokenizer!r}, seq_len={seq_len})
mark("dataset: list, vocabulary")
loader = AsyncDataLoader(data, {batch_size}, shuffle=True)
{between}
next(loader)
mark("first batch")
loader.shutdown()
"""
TORCH = """
import torch
mark("import torch")
"""
AWKWARD = """
import numpy
mark("import numpy")
import awkward
mark("import awkward")
"""
STARTED = """
loader.start()
import torch
mark("import torch, loader at work")
"""

Marks = list[tuple[str, float]]
"""Seconds since the process was created, at the end of each part."""


def run(code: str, folder: str) -> Marks:
    """One child. It runs in an empty folder, so that it finds nothing to import there."""
    begun = time.monotonic_ns()
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=folder
    )
    return [(part, (at - begun) / 1e9) for part, at in json.loads(process.stdout)]


def children(quick: bool) -> dict[str, str]:
    """The code of each child."""
    corpus = load_corpus(quick)

    def first(tokenizer: str, between: str = "") -> str:
        return IMPORT + NAMES + FIRST.format(
            folder=str(corpus.copies(COPIES)), tokenizer=tokenizer, seq_len=SEQ_LEN, batch_size=BATCH_SIZE,
            between=between,
        )  # fmt: skip

    bpe = str(corpus.tokenizer)
    bodies = {
        "interpreter": "",
        "import penstock": IMPORT,
        "import awkward": AWKWARD,
        "BPE": first(bpe),
        "byte": first("byte"),
    }
    if importlib.util.find_spec("torch"):
        bodies |= {
            "import torch": TORCH,
            "BPE, loader started first": first(bpe, STARTED),
        }
    return {name: FRAME.format(body=body) for name, body in bodies.items()}


def main() -> None:
    args = parser(__doc__).parse_args()
    repeats = args.repeats or (1 if args.quick else 15)
    report = Report(
        "start",
        args.quick,
        {"corpus": load_corpus(args.quick).name, "files": COPIES, "repeats": repeats},
    )
    codes = children(args.quick)
    collected: dict[str, list[Marks]] = {name: [] for name in codes}
    with tempfile.TemporaryDirectory() as folder:

        def starting(name: str) -> Callable[[], float]:
            def measure() -> float:
                collected[name].append(run(codes[name], folder))
                return collected[name][-1][-1][1]

            return measure

        for code in codes.values():
            run(code, folder)
        totals = interleave(repeats, {name: starting(name) for name in codes})
    for name, seconds in totals.items():
        alone = name == "interpreter" or name.startswith("import ")
        goal = Goal("<=", 0.8) if name in ("BPE", "byte") else None
        report.add(name, "done after" if alone else "first batch after", seconds, "s", goal)
    for name, runs in collected.items():
        for i, (part, _) in enumerate(runs[0]):
            took = [marks[i][1] - (marks[i - 1][1] if i else 0.0) for marks in runs]
            goal = Goal("<=", 0.1) if part == "import penstock" else None
            report.add(f"{name}: parts", part, took, "s", goal)
    report.close()
    slowest = {name: statistics.median(seconds) for name, seconds in totals.items()}
    if "import torch" in slowest:
        share = slowest["import torch"] / slowest["BPE"]
        print(f"# importing torch alone takes {share:.0%} as long as the first batch of tensors\n")


if __name__ == "__main__":
    main()
