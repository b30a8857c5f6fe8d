"""What the benchmarks share: the corpus, processes of their own, the machine's record, results.

In:    a corpus under ../shared/data, or where there is none the standard library's own text.
Out:   JSON lines in benchmarks/results, and a table on stdout.
Where: every script imports this; nothing of Penstock is imported here, so that a script decides
       what is loaded before its clock starts.
       A loopback Hub runs as a process of its own (`Hub`).
State: corpora in a cache folder (PENSTOCK_BENCH_DIR, by default below the temporary folder).
       PENSTOCK_BENCH_DATA names another folder to take books.parquet and gpt2-tokenizer.json from.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
RESULTS = HERE / "results"
SHARED = Path(os.environ.get("PENSTOCK_BENCH_DATA") or REPO.parent / "shared" / "data")
MB = 1_000_000

BATCH_SIZE, SEQ_LEN = 16, 1024
"""The shape of every batch that is measured."""
COPIES = 8
"""How often the corpus is repeated where a run needs to be long."""

HOSTED = "text.parquet"
REPOSITORY = "bench/books"
"""What the loopback Hub serves: this file, under many names, in this dataset."""

Kind = Literal["parquet", "jsonl"]


# Arguments


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script has."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="tiny sizes: shows that the script runs, measures nothing")
    made.add_argument("--repeats", type=int, help="rounds; every round measures each contender once")
    made.add_argument("--contender", type=json.loads, help=argparse.SUPPRESS)
    return made


# The corpus


@dataclass(frozen=True)
class Corpus:
    """Some text as Parquet (columns source, path, text) and the vocabulary that encodes it."""

    name: str
    folder: Path
    parquet: Path
    tokenizer: Path

    @property
    def jsonl(self) -> Path:
        """The same documents in the same order, as JSONL."""
        path = self.folder / "text.jsonl"
        if not path.exists():
            import pyarrow.parquet as pq

            file = pq.ParquetFile(self.parquet)
            with _made(path) as temporary, open(temporary, "w", encoding="utf-8") as lines:
                for i in range(file.num_row_groups):
                    for row in file.read_row_group(i).to_pylist():
                        lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        return path

    def copies(self, n: int, kind: Kind = "parquet") -> Path:
        """A folder with the corpus `n` times under different names. Links: no further space on disk or in its cache."""
        folder = self.folder / f"{kind}-x{n}"
        if not folder.exists():
            original = self.parquet if kind == "parquet" else self.jsonl
            with _made(folder) as temporary:
                temporary.mkdir()
                for i in range(n):
                    link(original, temporary / f"part-{i:02}.{kind}")
        return folder

    def hosted(self, compression: str, documents: int) -> Path:
        """A folder with the corpus as one file of the kind that is on the Hub: row groups of so many documents, and
        columns beside the text that nobody has asked for."""
        folder = self.folder / f"hosted-{compression}-{documents}"
        if not folder.exists():
            import pyarrow as pa
            import pyarrow.parquet as pq

            text = pq.read_table(self.parquet, columns=["text"]).column("text")
            names = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(len(text))]
            columns = {
                "text": text,
                "id": [f"<urn:uuid:{name[:32]}>" for name in names],
                "dump": ["CC-MAIN-2026-05"] * len(text),
                "url": [f"https://{name[:12]}.example.org/{name[12:40]}" for name in names],
                "score": [int(name[:4], 16) / 13107 for name in names],
            }
            with _made(folder) as temporary:
                temporary.mkdir()
                path = temporary / HOSTED
                pq.write_table(pa.table(columns), path, row_group_size=documents, compression=compression)
        return folder

    def texts(self) -> Any:
        """All documents as one large_string array."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        column = pq.read_table(self.parquet, columns=["text"]).column("text")
        return pa.concat_arrays(column.cast(pa.large_string()).chunks)


def load_corpus(quick: bool = False) -> Corpus:
    """The corpus, made and kept on disk at the first call. `quick` gives a few megabytes of it."""
    full = _books() if (SHARED / "books.parquet").is_file() else _standard_library()
    if not quick:
        return full
    folder = full.folder / "quick"
    folder.mkdir(exist_ok=True)
    path = folder / "text.parquet"
    if not path.exists():
        import pyarrow.parquet as pq

        table = pq.ParquetFile(full.parquet).read_row_group(0)
        with _made(path) as temporary:
            pq.write_table(table, temporary, row_group_size=max(1, len(table) // 4), compression="zstd")
    return Corpus(f"{full.name}, first row group", folder, path, full.tokenizer)


def bench_folder(name: str) -> Path:
    """A folder for files that may be made again at any time."""
    root = os.environ.get("PENSTOCK_BENCH_DIR")
    base = Path(root) if root else Path(tempfile.gettempdir()) / f"penstock-bench-{os.getuid()}"
    folder = base / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _books() -> Corpus:
    source = SHARED / "books.parquet"
    folder = bench_folder(f"books-{source.stat().st_size}")
    path = folder / "text.parquet"
    if not path.exists():
        with _made(path) as temporary:
            shutil.copyfile(source, temporary)  # what lies beside the corpus is not ours to link to
    return Corpus("books", folder, path, SHARED / "gpt2-tokenizer.json")


def _standard_library() -> Corpus:
    folder = bench_folder(f"stdlib-{platform.python_version()}")
    path, vocabulary = folder / "text.parquet", folder / "tokenizer.json"
    if not (path.exists() and vocabulary.exists()):
        texts = list(_own_texts())
        _write_texts(texts, path)
        _train(texts, vocabulary)
    return Corpus("stdlib", folder, path, vocabulary)


def _own_texts() -> Iterator[tuple[str, str]]:
    """The interpreter's documentation topics and its own source code."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield f"topics/{name}", text
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the test suite has files that are broken on purpose
        if text:
            yield str(file.relative_to(root)), text


def _write_texts(texts: Sequence[tuple[str, str]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names, bodies = zip(*texts, strict=True)
    table = pa.table({"source": ["stdlib"] * len(names), "path": names, "text": bodies})
    with _made(path) as temporary:
        pq.write_table(table, temporary, row_group_size=max(1, len(texts) // 8), compression="zstd")


def _train(texts: Sequence[tuple[str, str]], path: Path) -> None:
    """A byte-level BPE of 16,384 tokens from every fourth document: GPT-2's kind, seconds to make."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in texts[::4]), trainer)
    with _made(path) as temporary:
        tokenizer.save(str(temporary))


@contextmanager
def _made(path: Path) -> Iterator[Path]:
    """A name to make a file or folder under; it gets its own once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        try:
            os.replace(temporary, path)
        except OSError:
            if not path.is_dir():  # a folder that somebody else has made meanwhile is as good
                raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def link(original: Path, copy: Path) -> None:
    """Another name for a file, which counts as a file of its own; a copy where there are no such names."""
    try:
        os.link(original, copy)
    except OSError:
        shutil.copyfile(original, copy)


def text_ranges(path: Path) -> list[tuple[int, int]]:
    """Where the text of each row group of a Parquet file lies: start and length, by its footer."""
    import pyarrow.parquet as pq

    footer = pq.read_metadata(path)
    ranges = []
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        text = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "text")
        start = text.data_page_offset
        if text.has_dictionary_page and text.dictionary_page_offset:
            start = min(start, text.dictionary_page_offset)
        ranges.append((start, text.total_compressed_size))
    return ranges


# The Hub


class Hub:
    """The loopback Hub of penstock.testing in a process of its own, serving the one file of a folder under many names.

    Its log is there once it has ended. Whose request was whose is told by the time: all processes have the
    same monotonic clock.
    """

    def __init__(self, folder: Path, copies: int, *options: str) -> None:
        self._log = Path(tempfile.mkdtemp(prefix="penstock-bench-")) / "requests.jsonl"
        self.requests: list[dict[str, Any]] = []
        """What it was asked for, in the order of arrival, with the fields that docs/testing.md names."""
        command = [sys.executable, "-m", "penstock.testing", "hub", "--dir", str(folder), "--repo", REPOSITORY]
        command += ["--copies", str(copies), "--log", str(self._log), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint:
            raise RuntimeError(f"the Hub ended with code {self._process.wait()}; see its error above")

    def commit(self) -> str:
        """What its branch stands for."""
        with urllib.request.urlopen(f"{self.endpoint}/api/datasets/{REPOSITORY}/revision/main", timeout=30) as reply:
            return str(json.load(reply)["sha"])

    def cpu_s(self) -> float:
        """CPU time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def between(self, begun: float, ended: float) -> list[dict[str, Any]]:
        """The requests that came in that time; to be called once it has ended."""
        return [request for request in self.requests if begun <= request["time"] <= ended]

    def close(self) -> None:
        """End it, and read what it wrote down."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
        self.requests = [json.loads(line) for line in self._log.read_text().splitlines()]
        shutil.rmtree(self._log.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Measuring


def interleave(repeats: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure each contender once a round, so that all see the same weather; each is first in its turn."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for round in range(repeats):
        turn = round % len(names)
        for name in names[turn:] + names[:turn]:
            values[name].append(contenders[name]())
    return values


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: what slows a whole round cancels out."""
    return [a / b for a, b in zip(over, under, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def count(n: int) -> int:
    """Python and nothing else."""
    total = 0
    for i in range(n):
        total += i & 7
    return total


def timed(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def calibrate(seconds: float) -> int:
    """How far to `count` to take about so long on an idle core."""
    n = 100_000
    took = min(timed(lambda: count(n)) for _ in range(9))
    return max(1, int(n * seconds / took))


def wait_until_quiet(deadline_s: float = 10.0) -> None:
    """Until the process has used next to no CPU for a while: queues are full, nothing runs."""
    end = time.monotonic() + deadline_s
    quiet = 0
    while quiet < 3:
        if time.monotonic() > end:
            raise RuntimeError(f"a loader was still at work {deadline_s:.0f} s after nobody asked it any more")
        before = time.process_time()
        time.sleep(0.02)
        quiet = quiet + 1 if time.process_time() - before < 0.001 else 0


class Contender:
    """A script in a process of its own that prepares itself and then measures whenever it is told to.

    So contenders do not share memory, caches of imports, or the tokenizer's idea of how much the
    process has grown; while one measures the others wait for a line and take no time.
    """

    def __init__(self, script: str, case: Mapping[str, Any], quick: bool) -> None:
        self._case = dict(case)
        command = [sys.executable, script, "--contender", json.dumps(self._case), *(["--quick"] if quick else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> Self:
        """Wait until it is prepared."""
        self._line()
        return self

    def measure(self) -> dict[str, Any]:
        """One measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the contender {self._case} ended with code {self._process.wait()}; see its error above"
            )
        return line

    def close(self) -> None:
        """End it by ending its input; its own exit must be clean."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(measure: Callable[[], dict[str, Any]]) -> None:
    """The contender's side: say that it is ready, then answer every line with a measurement."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def process_memory() -> dict[str, int]:
    """Bytes: `rss`, `anonymous` (what no file backs) and `peak` (of rss), from /proc/self/status."""
    names = {"VmRSS": "rss", "RssAnon": "anonymous", "VmHWM": "peak"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = int(value.split()[0]) * 1024
    return found


# The record


@functools.cache
def machine() -> dict[str, Any]:
    """What the numbers were measured on. Taken once, when the script begins."""
    names = ("penstock", "gigatoken", "tokenizers", "pyarrow", "numpy", "torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "system": platform.platform(),
        "others_busy_percent": round(_busy_percent(), 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _busy_percent(seconds: float = 0.5) -> float:
    """How busy the cores are while this process does nothing: the work of others. nan where it is not known."""

    def ticks() -> tuple[int, int]:
        values = [int(v) for v in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return sum(values), values[3] + values[4]  # all; idle, and waiting for disks

    try:
        all_before, idle_before = ticks()
        time.sleep(seconds)
        all_after, idle_after = ticks()
    except (OSError, ValueError, IndexError):
        return float("nan")
    return 100 * (1 - (idle_after - idle_before) / max(1, all_after - all_before))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(REPO), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " + changes" if git("status", "--porcelain", "--", "src") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Goal:
    """What a median should reach. A goal is shown, and never fails a run."""

    sense: Literal["<=", "<", ">="]
    bound: float

    def met(self, value: float) -> bool:
        return {"<=": value <= self.bound, "<": value < self.bound, ">=": value >= self.bound}[self.sense]

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


@dataclass
class Report:
    """Results of one script: a JSON line each, and all of them as a table at the end."""

    name: str
    quick: bool
    settings: dict[str, Any] = field(default_factory=dict)
    """What the run was given; part of every line."""
    _rows: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        about = machine()
        self._begun = time.perf_counter()
        print(f"# {self.name}  {json.dumps(self.settings)}")
        print(
            f"# {about['cores']} cores, {about['cpu']}, Python {about['python']}, commit {about['commit']}", flush=True
        )
        if self.quick:
            print("# quick: tiny sizes, the numbers mean nothing")
        elif about["others_busy_percent"] > 10:
            print(f"# others keep the cores {about['others_busy_percent']} % busy: the numbers will be off", flush=True)

    def add(
        self, case: str, metric: str, values: float | Sequence[float], unit: str, goal: Goal | None = None, **more: Any
    ) -> float:
        """Record one result; several values are repeats of one measurement. Gives their median."""
        listed = [float(v) for v in values] if isinstance(values, Sequence) else [float(values)]
        median = statistics.median(listed)
        line: dict[str, Any] = {
            "bench": self.name, "case": case, "metric": metric, "unit": unit,
            "median": median, "min": min(listed), "max": max(listed), "n": len(listed), "values": listed,
        }  # fmt: skip
        if goal is not None:
            line |= {"goal": str(goal), "met": None if self.quick else goal.met(median)}
        line |= more | {"settings": self.settings, "quick": self.quick, "machine": machine()}
        self._write(line)
        spread = f"{show(min(listed))} to {show(max(listed))}" if len(listed) > 1 else ""
        reached = (
            "" if goal is None else str(goal) if self.quick else f"{goal}  {'met' if goal.met(median) else 'MISSED'}"
        )
        self._rows.append((case, metric, show(median), unit, spread, reached))
        return median

    def note(self, case: str, words: Mapping[str, str], **more: Any) -> None:
        """Record what is no number."""
        line = {"bench": self.name, "case": case, "words": dict(words)}
        self._write(line | more | {"settings": self.settings, "quick": self.quick, "machine": machine()})

    def _write(self, line: Mapping[str, Any]) -> None:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / f"{self.name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Print the table."""
        print(table(("case", "metric", "median", "unit", "min to max", "goal"), self._rows))
        print(f"# {time.perf_counter() - self._begun:.0f} s; appended to {RESULTS / self.name}.jsonl\n", flush=True)


def show(value: float) -> str:
    """A number with three digits that count."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}" if size >= 0.01 else f"{value:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; numbers to the right. A case is named once."""
    right = {"median"}
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    before = ""
    for n, row in enumerate([head, ["-" * w for w in widths], *rows]):
        cells = list(row)
        if n > 1:
            cells[0], before = ("" if row[0] == before else row[0]), row[0]
        pairs = zip(head, cells, widths, strict=True)
        lines.append("  ".join(c.rjust(w) if name in right else c.ljust(w) for name, c, w in pairs).rstrip())
    return "\n".join(lines)
