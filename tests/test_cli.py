"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import app, cli

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
COMMANDS = [
    "demo", "train", "config", "doctor", "smoke", "verify-resume", "bootstrap", "prepare", "cache info", "cache verify",
    "cache clear", "watch", "health", "report",
]  # fmt: skip


def run(*args: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PENSTOCK_CACHE": str(cache),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    command = [sys.executable, "-m", "penstock.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)


@pytest.mark.timeout(300)
def test_the_demo_trains_is_killed_resumes_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("demo", "--steps", "20", "--out", str(out), cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "report.html").stat().st_size > 1_000_000
    # Saved at 5, 10 and 15, killed after 17 or a little later.
    assert "[train] resumed from" in done.stdout
    assert re.search(
        r"resume   steps 16 to 1[789] ran before the kill and after it: bit for bit the same losses",
        done.stdout,
    ), done.stdout
    assert "Metrics:" in done.stdout
    assert (out / "report.html").absolute().as_uri() in done.stdout
    assert len(list((tmp_path / "stdlib").glob("*.parquet"))) == 1


def test_a_trained_vocabulary_gives_the_reference_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from penstock.encode.tokenizer import load_tokenizer
    from penstock.encode.train_bpe import train_tokenizer

    text = "def spam(eggs):\n    return 'größer' * 3  # 你好\n" * 50
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(text.encode(), 320))
    import pyarrow as pa

    [ids] = load_tokenizer(path, engine="gigatoken").engine.encode(
        pa.array([text], pa.large_string())
    )
    assert ids.tolist() == Tokenizer.from_file(str(path)).encode(text).ids


# Help


def said(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """A command line in this process: its exit code, and what it wrote."""
    with pytest.raises(SystemExit) as end:
        app(list(args))
    return int(end.value.code or 0), *capfd.readouterr()


def test_the_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, "--version") == (0, f"penstock {penstock.__version__}\n", "")


def test_these_are_all_commands() -> None:
    import typer

    names = []
    for name, command in typer.main.get_command(cli).commands.items():  # type: ignore[attr-defined]
        names += [f"{name} {inner}" for inner in getattr(command, "commands", ())] or [name]
    assert sorted(names) == sorted(COMMANDS)


@pytest.mark.parametrize("columns", [80, 120])
def test_help_has_every_command_on_a_line(
    columns: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = said(capfd, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    for name in {name.split()[0] for name in COMMANDS}:
        assert re.search(rf"^│ {name} +\S.*[.?] +│$", out, re.MULTILINE), name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_what_it_does(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = said(capfd, *command.split(), "--help")
    assert code == 0
    assert f"Usage: penstock {command} " in out
    assert "cache" in command or f"Example: penstock {command} " in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_without_a_command_help_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capfd)
    assert code == 0
    assert "Usage: penstock" in out + err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom penstock.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'numpy', 'pyarrow', 'gigatoken', 'tokenizers', 'huggingface_hub', 'plotly', 'asyncio')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_every_command(command: str) -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert re.search(rf"^\| \[?`penstock {command.split()[0]}`.* \|$", page, re.MULTILINE)


# Mistakes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with things that go wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("a file\n")
    (tmp_path / "docs.txt").write_text("some text\n" * 1000)
    for name in ("bad.parquet", "bad.toml", "bad.jsonl.gz", "bad_heartbeat.jsonl"):
        (tmp_path / name).write_bytes(b"\x1f\x8b\x00 nonsense \xff\n")
    for name in ("loop.jsonl", "loop.toml", "loop.json"):
        (tmp_path / name).symlink_to(name)  # nobody can open it, whatever rights they have
    return tmp_path


MISTAKES = [
    # A file that is not there.
    ("train --config no.toml", 1, "no.toml"),
    ("config no.toml", 1, "no.toml"),
    ("doctor no.jsonl", 2, "no.jsonl"),
    ("smoke --dataset no.jsonl", 2, "no.jsonl"),
    ("verify-resume no.jsonl", 2, "no.jsonl"),
    ("bootstrap no.jsonl --out out.jsonl", 1, "no.jsonl"),
    ("prepare no.jsonl --out out", 1, "no.jsonl"),
    ("watch --once no.jsonl", 1, "no.jsonl"),
    ("health no.jsonl", 2, "no.jsonl"),
    ("report no.jsonl", 1, "no.jsonl"),
    # A value that does not fit.
    ("demo --steps 3", 1, "--steps"),
    ("train --dataset stdlib --size huge", 1, "--size = 'huge': must be one of"),
    ("train --dataset stdlib --set n_workers=lots", 1, "n_workers"),
    ("config --set n_workers=lots", 1, "must be an integer"),
    ("config --preset nobodys", 1, "nobodys"),
    ("doctor docs.txt --set n_workers=lots", 2, "n_workers"),
    ("smoke --timeout 0", 2, "--timeout = '0'"),
    ("verify-resume docs.txt --points 0", 2, "--points"),
    ("bootstrap docs.txt --out out.jsonl --bytes lots", 1, "--bytes = 'lots'"),
    ("prepare docs.txt --out out --slice 3", 1, "--slice = '3': must be"),
    ("prepare docs.txt --out out --filter what", 1, "filter="),
    ("prepare docs.txt --out out --engine spark", 1, "--engine = 'spark'"),
    ("cache clear --yes --older-than soon", 1, "--older-than = 'soon'"),
    ("watch --once --total-tokens many", 1, "--total-tokens"),
    ("health --for-s=-1", 2, "--for-s"),
    # A file that cannot be read.
    ("train --config loop.toml", 1, "loop.toml"),
    ("doctor loop.jsonl", 2, "loop.jsonl"),
    ("watch --once loop.jsonl", 1, "loop.jsonl"),
    ("report loop.jsonl", 1, "loop.jsonl"),
    # A file that is something else.
    ("config bad.toml", 1, "bad.toml"),
    ("doctor bad.parquet", 2, "bad.parquet"),
    ("prepare bad.parquet --out out", 1, "bad.parquet"),
    ("prepare bad.jsonl.gz --out out", 1, "bad.jsonl.gz"),
    ("watch --once bad_heartbeat.jsonl", 1, "bad_heartbeat.jsonl"),
    ("health bad_heartbeat.jsonl", 2, "bad_heartbeat.jsonl"),
    ("report bad_heartbeat.jsonl", 1, "bad_heartbeat.jsonl"),
    # A setting, an option or a command that does not exist.
    ("train --dataset stdlib --set n_worker=2", 1, "n_workers"),
    ("smoke --set n_worker=2", 2, "n_workers"),
    ("tain", 2, "Did you mean 'train'"),
    ("cache cleer", 2, "clear"),
    *((f"{command} --nonsense", 2, f"penstock {command}: No such option: --nonsense") for command in COMMANDS),
    # Something that the disk refuses.
    ("bootstrap docs.txt --out file/out.jsonl", 1, "file"),
    ("cache info --dir file/cache", 1, "file"),
    ("demo --out file/out", 1, "file"),
    ("doctor docs.txt --seq-len 8 --batch 1 --seconds 0.1 --trace file/trace.json", 2, "file"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "about"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_one_line_and_an_exit_code(
    line: str, code: int, about: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, _, err = said(capfd, *line.split())
    assert ended == code, err
    assert len(err.splitlines()) == 1, err
    assert about in err
    assert err.startswith(("penstock", "[smoke][FAIL] ", "cannot tell: "))


SHOWN = [("train --config no.toml", 1), ("doctor no.jsonl", 2), ("cache info --dir file/cache", 1)]


@pytest.mark.parametrize(("line", "code"), SHOWN, ids=[line for line, _ in SHOWN])
def test_debug_shows_where_it_came_from(
    line: str, code: int, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for given in (["--debug", *line.split()], [*line.split(), "--debug"]):
        ended, _, err = said(capfd, *given)
        assert ended == code
        assert "Traceback (most recent call last):" in err
        assert re.search(r'File ".*/penstock/cli/', err)


def test_an_exception_that_nobody_expects_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.data_choice.load", None)
    with pytest.raises(TypeError):
        app(["config"])


def test_a_full_disk_is_one_line(place: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock.cli.main", "config"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "penstock: No space left on device\n")


@pytest.mark.parametrize(
    "line", ["config", "train --help", "health bad_heartbeat.jsonl --json", "cache info --json"]
)
def test_a_reader_that_goes_ends_it_quietly(line: str, place: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as gone:
        command = [sys.executable, "-m", "penstock.cli.main", *line.split()]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("line", "loaded"), [("doctor docs.txt --seconds 1000", "penstock.tools.doctor")]
)
def test_ctrl_c_ends_it_without_a_traceback(line: str, loaded: str, place: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "penstock.cli.main", *line.split()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    try:
        for imported in process.stderr:  # the command has begun once it has imported what it needs
            if imported.split()[-1] == loaded:
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(60)
    assert process.returncode == 130, err
    assert "Traceback" not in err


HEARTBEAT = (
    '{"ts": 1.0, "iso": "1970-01-01T00:00:01+00:00", "mono": 1.0, "pid": 1, "rank": 0, "step": 1, "msg": "progress", '
    '"loss": 1.0, "toks_per_s": 1.0, "dt_fetch_s": 0.1}\n'
)
EXTRAS = {
    "torch", "functorch", "torchgen", "plotly", "prometheus_client", "obstore", "tokenizers", "huggingface_hub", "yaml",
    "tiktoken", "tensorboard",
}  # fmt: skip


@pytest.fixture(scope="module")
def core_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries of this environment without those of the extras."""
    import numpy

    folder = tmp_path_factory.mktemp("core")
    for path in Path(numpy.__file__).parent.parent.iterdir():
        if path.name.partition(".")[0] not in EXTRAS and path.suffix not in (".pth", ".dist-info"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize(
    ("line", "code", "extra"),
    [
        ("train --dataset docs.txt --out new", 1, "torch"),
        ("report heartbeat.jsonl", 1, "report"),
        ("prepare s3://bucket/key.jsonl --out out", 1, "buckets"),
        ("watch heartbeat.jsonl --metrics-port 0", 1, "metrics"),
        ("doctor docs.txt --tokenizer cl100k_base.tiktoken", 2, "tiktoken"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    line: str, code: int, extra: str, core_only: Path, place: Path
) -> None:
    (place / "heartbeat.jsonl").write_text(HEARTBEAT)
    (place / "cl100k_base.tiktoken").write_text("IQ== 0\n")
    path = f"{Path(penstock.__file__).parent.parent}{os.pathsep}{core_only}"
    command = [sys.executable, "-S", "-m", "penstock.cli.main", *line.split()]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"pip install 'penstock[{extra}]'" in done.stderr


# Completion


def completed(line: str, shell: str = "bash") -> list[str]:
    """What a shell is told to offer after a line, by the protocol that its script uses."""
    bash = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    more = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    env = (
        os.environ
        | (bash if shell == "bash" else more)
        | {"_PENSTOCK_COMPLETE": f"complete_{shell}"}
    )
    command = [sys.executable, "-m", "penstock.cli.main"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_and_options() -> None:
    assert completed("penstock tr") == ["train"]
    assert completed("penstock cache v") == ["verify"]
