"""Settings: every name in every dialect, which value wins, what is refused, `penstock config`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.settings import PRESETS, SETTINGS, Settings, build, load

ROOT = Path(__file__).parent.parent
Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file in the working directory, and no variable in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PENSTOCK_", "NSA_FWE_")) and name != "PENSTOCK_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return Path(name)

    return write


def toml(table: str, **values: Any) -> str:
    return f"[{table}]\n" + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in values.items()
    )


def refused(match: str, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError, match=match) as caught:
        load(*args, **{"environment": {}, **kwargs})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def show(name: str, value: Any) -> str:
    return SETTINGS[name].show(value)


# Names

NAMES = [
    ("prefetch", False, "NSA_FWE_PREFETCH", "use_async_loader", None),
    ("prefetch_size", 5, "NSA_FWE_Q", "async_prefetch_size", "prefetch_batches"),
    ("n_workers", 3, None, "async_n_workers", "num_workers"),
    ("doc_batch", 128, "NSA_FWE_DOC_BATCH", None, None),
    ("report_docs", 500, "NSA_FWE_REPORT_DOCS", None, None),
    ("warmup_batches", 16, "NSA_FWE_WARMUP_BATCHES", None, None),
    ("warmup_timeout", 12.5, "NSA_FWE_WARMUP_TIMEOUT", None, None),
    ("shuffle", True, None, None, "shuffle"),
    ("batch_size", 32, None, "batch_size", "batch_size"),
    ("learning_rate", 0.25, None, "learning_rate", "learning_rate"),
    ("epochs", 10, None, "num_epochs", "num_epochs"),
]


@pytest.mark.parametrize(("setting", "value", "nsa", "in_toml", "in_json"), NAMES)
def test_each_name_of_each_dialect_sets_its_setting(
    setting: str,
    value: Any,
    nsa: str | None,
    in_toml: str | None,
    in_json: str | None,
    write: Write,
) -> None:
    def check(settings: Settings, source: str) -> None:
        assert settings[setting] == value
        assert {name: where for name, where in settings.sources.items() if where != "default"} == {
            setting: source
        }

    variable = f"PENSTOCK_{setting.upper()}"
    check(load(environment={variable: show(setting, value)}), f"environment {variable}")
    own = write("own.toml", toml("loader", **{setting: value}))
    check(load(own, environment={}), f"file own.toml [loader] {setting}")
    check(load(overrides={setting: value}, environment={}), f"command line --{setting}")
    if nsa:
        check(load(environment={nsa: show(setting, value)}), f"environment {nsa}")
    if in_toml:
        path = write("two.toml", toml("training", **{in_toml: value}))
        check(load(path, environment={}), f"file two.toml [training] {in_toml}")
    if in_json:
        path = write("three.json", json.dumps({"training": {in_json: value}}))
        check(load(path, environment={}), f"file three.json training.{in_json}")


def test_every_setting_has_a_variable_and_a_line_in_the_example_file() -> None:
    written = (ROOT / "configs" / "penstock.toml").read_text()
    for setting in SETTINGS:
        assert re.search(rf"^(# )?{setting} = ", written, re.MULTILINE), setting
    every = re.sub(r"^# (\w+ = )", r"\1", written.partition("[data]")[0], flags=re.MULTILINE)
    import tomllib

    given = {"batch_size", "shuffle", "seed", "epochs"}
    for name, value in tomllib.loads(every)["loader"].items():
        variables = {f"PENSTOCK_{name.upper()}": str(value).lower()}
        assert name in given or load(environment=variables)[name] == SETTINGS[name].default, name


def test_the_guides_own_examples_are_read(write: Write) -> None:
    path = write(
        "002.toml",
        "[training]\n# Async Data Loader\nuse_async_loader = true\nasync_n_workers = 4   # threads\n"
        "async_prefetch_size = 8      # batches\n",
    )
    two = load(path, environment={})
    assert (two["prefetch"], two["n_workers"], two["prefetch_size"]) == (True, 4, 8)
    path = write(
        "003.json",
        '{\n  "training": {\n    "learning_rate": 0.001,\n    "batch_size": 32,\n    "num_epochs": 10,\n'
        '    // Async DataLoader parameters (all optional)\n    "prefetch_batches": 4,    // How many\n'
        '    "num_workers": 4,          // Number of "threads"\n    "shuffle": true  // each epoch\n  }\n}\n',
    )
    three = load(path, environment={})
    assert (three["learning_rate"], three["batch_size"], three["epochs"]) == (0.001, 32, 10)
    assert (three["prefetch_size"], three["n_workers"], three["shuffle"]) == (4, 4, True)


# Precedence


def test_command_line_over_environment_over_file_over_default(write: Write) -> None:
    path = write("a.toml", toml("loader", prefetch_size=2))
    variables, options = {"NSA_FWE_Q": "3"}, {"prefetch_size": 4}
    for file, environment, overrides, value, source in [
        (None, {}, {}, 8, "default"),
        (path, {}, {}, 2, "file a.toml [loader] prefetch_size"),
        (path, variables, {}, 3, "environment NSA_FWE_Q"),
        (path, {}, options, 4, "command line --prefetch_size"),
        (path, variables, options, 4, "command line --prefetch_size"),
    ]:
        settings = load(file, environment=environment, overrides=overrides)  # type: ignore[arg-type]
        assert (settings["prefetch_size"], settings.sources["prefetch_size"]) == (value, source)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_sets_workers_and_prefetch(name: str, write: Write) -> None:
    for settings in (
        load(preset=name, environment={}),
        load(environment={"PENSTOCK_PRESET": name}),
        load(write("a.toml", f'preset = "{name}"\n'), environment={}),
        load(write("b.toml", toml("training", preset=name)), environment={}),
    ):
        assert (settings["n_workers"], settings["prefetch_size"]) == PRESETS[name]
        assert settings.sources["n_workers"] == f"preset {name}"
        assert settings["preset"] == name


def test_a_preset_ranks_just_below_its_own_source(write: Write) -> None:
    path = write("a.toml", 'preset = "C"\n' + toml("loader", n_workers=3))
    variables = {"PENSTOCK_PRESET": "A", "NSA_FWE_Q": "7"}
    for settings, wanted in (
        (load(path, environment={}), (3, 8)),
        (load(path, environment=variables), (8, 7)),
        (load(path, environment=variables, preset="balanced"), (2, 3)),
    ):
        assert (settings["n_workers"], settings["prefetch_size"]) == wanted


# Files


def test_the_file_is_given_or_named_by_the_environment_or_found(write: Write) -> None:
    write("penstock.toml", toml("loader", seed=1))
    named = write("named.toml", toml("loader", seed=2))
    found = load(environment={})
    assert (found["seed"], found.file, found.file_from) == (1, Path("penstock.toml"), "found")
    by_variable = load(environment={"PENSTOCK_CONFIG": "named.toml"})
    assert (by_variable["seed"], by_variable.file) == (2, named)
    assert load("penstock.toml", environment={"PENSTOCK_CONFIG": "named.toml"})["seed"] == 1


def test_a_broken_file_is_named_with_its_line(write: Write, tmp_path: Path) -> None:
    refused("file gone.toml: cannot be read: No such file", "gone.toml")
    refused("must end in .toml or .json", write("a.yaml", ""))
    (tmp_path / "latin.toml").write_bytes(b"# gr\xfc\xdfe")
    refused("latin.toml: is not valid TOML: .*position 4", "latin.toml")
    refused(r"a.toml: is not valid TOML: .*line 2", write("a.toml", "[loader]\nseed = = 3\n"))
    broken = '{ // one\n"loader": { // two\n"seed": x}}'
    refused(r"a.json: is not valid JSON: .*line 3 column 9", write("a.json", broken))
    refused("must be an object", write("c.json", "[]"))
    refused("loader = 3: must be a table", write("f.toml", "loader = 3"))


# Refusals


def test_an_unknown_name_is_refused_with_the_nearest(write: Write) -> None:
    path = write("a.toml", toml("loader", prefetch_sise=3))
    refused(r"\[loader\] prefetch_sise: unknown; did you mean prefetch_size", path)
    path = write("c.json", '{"training":{"prefetch_batch":3}}')
    refused(r"training.prefetch_batch: unknown; did you mean prefetch_batches", path)
    refused("PENSTOCK_SEEED: unknown; .* PENSTOCK_SEED", environment={"PENSTOCK_SEEED": "1"})
    refused("NSA_FWE_WARMUP: unknown; .* NSA_FWE_WARMUP_", environment={"NSA_FWE_WARMUP": "1"})
    refused("command line --shufle: unknown; .* shuffle", overrides={"shufle": True})
    refused("zzz: unknown; known are async_n_workers, ", overrides={"zzz": True})


def test_two_names_of_one_setting_may_agree_and_must_not_differ(write: Write) -> None:
    path = write("a.toml", toml("training", num_workers=2) + toml("loader", n_workers=3))
    message = refused("both set n_workers", path)
    assert "[training] num_workers = 2" in message
    assert "[loader] n_workers = 3" in message
    agreeing = load(environment={"NSA_FWE_PREFETCH": "0", "PENSTOCK_PREFETCH": "off"})
    assert agreeing["prefetch"] is False
    variables = {"NSA_FWE_Q": "4", "PENSTOCK_PREFETCH_SIZE": "8"}
    refused("both set prefetch_size", environment=variables)


@pytest.mark.parametrize(
    ("setting", "value", "needs"),
    [
        ("prefetch_size", 0, "an integer ≥ 1, or 'auto'"),
        ("n_workers", "-1", "an integer ≥ 0, or 'auto'"),
        ("prefetch", "maybe", "true or false"),
        ("warmup_timeout", -1, "a number ≥ 0"),
        ("memory_limit", "512 MiBs", "a size such as 512MiB"),
        ("workers", 4, "one of 'thread', 'process'"),
        ("cpus", "one", "CPU numbers"),
        ("preset", "D", "text that matches balanced|"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_would(
    setting: str, value: Any, needs: str, write: Write
) -> None:
    says = f"{re.escape(repr(value))}: must be .*{re.escape(needs)}"
    refused(f"command line --{setting} = {says}", overrides={setting: value})
    path = write("a.json", json.dumps({"loader": {setting: value}}))
    refused(f"loader.{setting} = {says}", path)
    if isinstance(value, str):
        variable = f"PENSTOCK_{setting.upper()}"
        refused(f"environment {variable} = {says}", environment={variable: value})


# The loader's arguments


def test_prefetch_off_is_the_loader_without_threads() -> None:
    on = load(overrides={"batch_size": 2, "n_workers": 4}, environment={})
    assert on.loader_arguments()["n_workers"] == 4
    off = load(overrides={"batch_size": 2, "n_workers": 4, "prefetch": False}, environment={})
    assert off.loader_arguments()["n_workers"] == 0


def test_a_loader_is_built_from_file_environment_and_arguments(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toml("data", kind="synthetic", num_samples=5)
    path = write("a.toml", toml("loader", batch_size=2, seed=1) + data)
    monkeypatch.setenv("NSA_FWE_Q", "3")
    made, arguments = build(path, None, {"seed": 4, "preset": "balanced", "preprocess": len})
    assert len(made) == 5
    assert (arguments["batch_size"], arguments["seed"], arguments["prefetch_size"]) == (2, 4, 3)
    assert (arguments["n_workers"], arguments["preprocess"]) == (2, len)
    sentinel = object()
    assert build(path, sentinel)[0] is sentinel


def test_what_is_missing_is_named(write: Write) -> None:
    with pytest.raises(ConfigError, match="batch_size is not set"):
        load(environment={}).loader_arguments()
    assert load(environment={}).loader_arguments(3)["batch_size"] == 3
    with pytest.raises(ConfigError, match=r"no data"):
        build(write("a.toml", toml("loader", batch_size=2)))
    with pytest.raises(ConfigError, match=r"argument bach_size: unknown; .* batch_size"):
        build(overrides={"bach_size": 2})


# Data


def test_text_is_read_relative_to_the_file(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "parquet").symlink_to(corpus / "parquet")
    (tmp_path / "deep" / "tokenizer.json").symlink_to(corpus / "tokenizer.json")
    text = toml(
        "data",
        kind="text",
        urls=["parquet"],
        tokenizer="tokenizer.json",
        seq_len=16,
        chunk_bytes="1MiB",
        on_bad_record="quarantine:bad.jsonl",
    )
    remote = toml("data.remote", fetches=3, cache_bytes="1GiB")
    (tmp_path / "deep" / "a.toml").write_text(toml("loader", doc_batch=7) + text + remote)
    settings = load("deep/a.toml", environment={"NSA_FWE_REPORT_DOCS": "9"})
    assert settings.data is not None
    assert settings.data.where == "file deep/a.toml [data]"
    data = settings.data.build(settings.text_arguments())
    assert (data.seq_len, data.options.chunk_bytes) == (16, 1 << 20)
    assert (data.remote.doc_batch, data.remote.report_docs) == (7, 9)
    assert (data.remote.fetches, data.remote.cache_bytes) == (3, 1 << 30)
    assert data.quarantine == str(tmp_path / "deep" / "bad.jsonl")


MIXTURE = """
[data]
kind = "text"
tokenizer = "byte"
seq_len = 8
on_end = "stop"
[data.mixture.web]
weight = 0.7
urls = "web"
[data.mixture.made]
weight = 1
kind = "synthetic"
vocab_size = 257
"""


def test_parts_of_a_mixture_inherit_what_applies_to_them(write: Write, tmp_path: Path) -> None:
    data = load(write("a.toml", MIXTURE), environment={}).data
    assert data is not None
    assert (data.kind, data.parameters) == ("mixture", {"on_end": "stop"})
    (web, web_weight), (made, made_weight) = data.parts["web"], data.parts["made"]
    assert (web.kind, web_weight, made.kind, made_weight) == ("text", 0.7, "synthetic", 1.0)
    assert web.parameters == {"tokenizer": "byte", "seq_len": 8, "urls": str(tmp_path / "web")}
    assert made.parameters == {"seq_len": 8, "vocab_size": 257}


def test_what_data_does_not_take_is_refused(write: Write) -> None:
    text = {"kind": "text", "urls": "x", "tokenizer": "byte", "seq_len": 8}
    for table, says in (
        (toml("data", urls="x"), r"\[data\] kind = None: must be one of 'text', "),
        (toml("data", kind="txt"), r"\[data\] kind = 'txt': must be one of 'text', "),
        (
            toml("data", kind="text", urls="x"),
            r"\[data\]: kind = 'text' needs tokenizer and seq_len",
        ),
        (toml("data", **text, seqlen=8), r"\[data\] seqlen: unknown; did you mean seq_len"),
        (toml("data", **text, doc_batch=8), r"\[data\] doc_batch: unknown"),
        (toml("data", **text, on_end="stop"), r"\[data\] on_end: unknown"),
        (MIXTURE.replace("seq_len", "seqlen"), r"needs seq_len"),
    ):
        refused(says, write("a.toml", table))


# The command


def command(*args: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "penstock.cli.main", "config", *args]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "NSA_FWE_"))
    }
    return subprocess.run(
        line, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment | variables
    )


def table(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    assert done.returncode == 0, done.stderr
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in done.stdout.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_config_shows_each_value_and_its_source(write: Write, tmp_path: Path) -> None:
    write(
        "a.json",
        '{"training": {"num_workers": 2, "batch_size": 8}, "data": {"kind": "synthetic", "seq_len": 9}}',
    )
    done = command(
        "a.json", "--set", "seed=7", "--set", "memory_limit=512MiB", cwd=tmp_path, NSA_FWE_Q="4"
    )
    rows = table(done)
    assert done.stdout.startswith("file a.json (given)\n")
    assert rows["prefetch_size"] == ["4", "environment NSA_FWE_Q"]
    assert rows["n_workers"] == ["2", "file a.json training.num_workers"]
    assert rows["seed"] == ["7", "command line --set seed"]
    assert rows["memory_limit"] == ["512MiB", "command line --set memory_limit"]
    assert rows["shuffle"] == ["auto", "default"]
    assert rows["data.seq_len"] == ["9", "file a.json data"]
    assert rows.keys() >= SETTINGS.keys()


def test_config_as_json_is_for_programs(write: Write, tmp_path: Path) -> None:
    write("a.toml", MIXTURE)
    done = command(
        "a.toml", "--json", "--set", "cpus=0-2", cwd=tmp_path, PENSTOCK_PRESET="balanced"
    )
    shown = json.loads(done.stdout)
    assert (shown["file"], shown["file_from"], shown["preset"]) == ("a.toml", "given", "balanced")
    assert shown["settings"]["cpus"] == {"value": [0, 1, 2], "source": "command line --set cpus"}
    assert shown["settings"]["n_workers"] == {"value": 2, "source": "preset balanced"}
    assert shown["data"]["parts"]["made"][0]["parameters"]["vocab_size"] == 257


SIGNED = "https://bob:PASSWD@host/{}?X-Sig=SECRETSIG#SECRETPART"
SECRET = f"""
[data]
seq_len = 9
[data.mixture.one]
kind = "text"
weight = 1
urls = "{SIGNED.format("a.jsonl")}"
tokenizer = "{SIGNED.format("tokenizer.json")}"
[data.mixture.many]
kind = "text"
weight = 1
urls = ["{SIGNED.format("b.jsonl")}", "s3://KEY:PASSWD@bucket/c.jsonl", "https://bob:PASSWD@[host/d.jsonl?SECRETSIG"]
tokenizer = "byte"
"""
OPEN = ["https://host/b.jsonl", "s3://bucket/c.jsonl", "https://[host/d.jsonl"]


def test_config_shows_addresses_without_passwords_and_signatures(
    write: Write, tmp_path: Path
) -> None:
    write("a.toml", SECRET)
    plain, as_json = command("a.toml", cwd=tmp_path), command("a.toml", "--json", cwd=tmp_path)
    rows = table(plain)
    assert rows["data.one.urls"][0] == "https://host/a.jsonl"
    assert rows["data.one.tokenizer"][0] == "https://host/tokenizer.json"
    assert json.loads(rows["data.many.urls"][0]) == OPEN
    parts = json.loads(as_json.stdout)["data"]["parts"]
    assert parts["one"][0]["parameters"]["urls"] == "https://host/a.jsonl"
    assert parts["one"][0]["parameters"]["tokenizer"] == "https://host/tokenizer.json"
    assert parts["many"][0]["parameters"]["urls"] == OPEN
    for word in ("PASSWD", "SECRET", "KEY", "bob"):
        assert word not in plain.stdout + as_json.stdout


@pytest.mark.parametrize(
    ("args", "variables", "says"),
    [
        (
            ("--set", "seeed=1"),
            {},
            "command line --set seeed: unknown; did you mean seed?",
        ),
        (("--set", "seed"), {}, "command line --set seed: must be KEY=VALUE"),
        (("--preset", "D"), {}, "command line --preset = 'D': must be text that matches balanced|"),
        (("gone.toml",), {}, "file gone.toml: cannot be read"),
        (
            (),
            {"NSA_FWE_Q": "lots"},
            "environment NSA_FWE_Q = 'lots': must be an integer ≥ 1",
        ),
    ],
)
def test_config_ends_with_one_line_on_bad_input(
    args: tuple[str, ...], variables: dict[str, str], says: str, tmp_path: Path
) -> None:
    done = command(*args, cwd=tmp_path, **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"penstock: {says}")
    assert done.stderr.count("\n") == 1
