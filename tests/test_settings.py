"""Settings: every name in every dialect, which value wins, what is refused, `penstock config`."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncDataLoader, SyntheticDataset
from penstock.errors import ConfigError
from penstock.settings import PRESETS, SETTINGS, Settings, build, load
from tests.commands import Done, run

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
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    return f"[{table}]\n" + "".join(lines)


def refused(match: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load(*args, **{"environment": {}, **kwargs})
    assert "\n" not in str(caught.value)


def two(settings: Settings) -> tuple[int, int]:
    return settings["n_workers"], settings["prefetch_size"]


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
    setting: str, value: Any, nsa: str, in_toml: str, in_json: str, write: Write
) -> None:
    def check(source: str, path: Path | None = None, **how: Any) -> None:
        settings = load(path, **{"environment": {}, **how})
        assert settings[setting] == value
        given = {name: where for name, where in settings.sources.items() if where != "default"}
        assert given == {setting: source}

    for variable in filter(None, [f"PENSTOCK_{setting.upper()}", nsa]):
        shown = SETTINGS[setting].show(value)
        check(f"environment {variable}", environment={variable: shown})
    check(f"command line --{setting}", overrides={setting: value})
    own = write("own.toml", toml("loader", **{setting: value}))
    check(f"file own.toml [loader] {setting}", own)
    if in_toml:
        path = write("two.toml", toml("training", **{in_toml: value}))
        check(f"file two.toml [training] {in_toml}", path)
    if in_json:
        text = json.dumps({"training": {in_json: value}}, indent=1)
        path = write("three.json", text.replace("{\n", '{ // of a "guide"\n'))
        check(f"file three.json [training] {in_json}", path)


def test_every_setting_has_a_variable_and_a_line_in_the_example_file() -> None:
    written = (ROOT / "configs" / "penstock.toml").read_text().partition("[data]")[0]
    every = re.sub(r"^# (\w+ = )", r"\1", written, flags=re.MULTILINE)
    given = {"batch_size", "shuffle", "seed", "epochs"}
    table = tomllib.loads(every)
    lines = table["loader"] | {"preset": None}
    assert lines.keys() >= SETTINGS.keys()
    for name in SETTINGS.keys() - given - {"preset"}:
        variables = {f"PENSTOCK_{name.upper()}": str(lines[name]).lower()}
        assert load(environment=variables)[name] == SETTINGS[name].default, name


# Precedence


def test_command_line_over_environment_over_file_over_default(write: Write) -> None:
    path = write("a.toml", toml("loader", prefetch_size=2))
    variables, options = {"NSA_FWE_Q": "3"}, {"prefetch_size": 4}
    for file, environment, overrides, value, source in [
        (None, {}, {}, 8, "default"),
        (path, {}, {}, 2, "file a.toml [loader] prefetch_size"),
        (path, variables, {}, 3, "environment NSA_FWE_Q"),
        (path, variables, options, 4, "command line --prefetch_size"),
    ]:
        settings = load(file, environment=environment, overrides=overrides)  # type: ignore[arg-type]
        assert (settings["prefetch_size"], settings.sources["prefetch_size"]) == (value, source)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_workers_and_prefetch(name: str, write: Write) -> None:
    for settings in (
        load(preset=name, environment={}),
        load(environment={"PENSTOCK_PRESET": name}),
        load(write("a.toml", f'preset = "{name}"\n'), environment={}),
        load(write("b.toml", toml("training", preset=name)), environment={}),
    ):
        assert two(settings) == PRESETS[name]
        assert settings.sources["n_workers"] == f"preset {name}"


def test_a_preset_ranks_just_below_its_own_source(write: Write) -> None:
    path = write("a.toml", 'preset = "C"\n' + toml("loader", n_workers=3))
    variables = {"PENSTOCK_PRESET": "A", "NSA_FWE_Q": "7"}
    assert two(load(path, environment={})) == (3, 8)
    assert two(load(path, environment=variables)) == (8, 7)
    assert two(load(path, environment=variables, preset="balanced")) == (2, 3)


def test_the_file_is_given_or_named_by_the_environment_or_found(write: Write) -> None:
    write("penstock.toml", toml("loader", seed=1))
    named = write("named.toml", toml("loader", seed=2))
    found = load(environment={})
    assert (found["seed"], found.file, found.file_from) == (1, Path("penstock.toml"), "found")
    by_variable = load(environment={"PENSTOCK_CONFIG": "named.toml"})
    assert (by_variable["seed"], by_variable.file) == (2, named)
    assert load("penstock.toml", environment={"PENSTOCK_CONFIG": "named.toml"})["seed"] == 1


# Refusals


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", b"loader: 3", "a.yaml: is not valid JSON"),
        ("latin.toml", b"# gr\xfc\xdfe", "latin.toml: is not valid TOML: .*position 4"),
        ("a.toml", b"[loader]\nseed = = 3\n", "a.toml: is not valid TOML: .*line 2"),
        ("a.json", b'{ // 1\n"loader": { // 2\n"seed": x}}', "not valid JSON: .*line 3 column 9"),
        ("c.json", b"[]", "must be an object"),
        ("f.toml", b"n_workers = 3", "n_workers: not a table; known are loader, training"),
        ("a.toml", b"[loader]\nprefetch_sise = 3", r"\[loader\] prefetch_sise: .* prefetch_size"),
        ("c.json", b'{"training":{"prefetch_batch":3}}', "prefetch_batch: .* prefetch_batches"),
    ],
)
def test_a_broken_file_is_named_with_the_place(
    name: str, text: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text)
    refused(f"file .*{says}", name)
    refused("file gone.toml: cannot be read: No such file", "gone.toml")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    refused("PENSTOCK_SEEED: unknown; .* PENSTOCK_SEED", environment={"PENSTOCK_SEEED": "1"})
    refused("NSA_FWE_WARMUP: unknown; .* NSA_FWE_WARMUP_", environment={"NSA_FWE_WARMUP": "1"})
    refused("command line --shufle: unknown; .* shuffle", overrides={"shufle": True})


def test_two_names_of_one_setting_may_agree_and_must_not_differ(write: Write) -> None:
    path = write("a.toml", toml("training", num_workers=2) + toml("loader", n_workers=3))
    refused(r"\[loader\] n_workers = 3 and .* num_workers = 2 both set n_workers", path)
    agreeing = load(environment={"NSA_FWE_PREFETCH": "0", "PENSTOCK_PREFETCH": "off"})
    assert agreeing["prefetch"] is False
    variables = {"NSA_FWE_Q": "4", "PENSTOCK_PREFETCH_SIZE": "8"}
    refused("both set prefetch_size", environment=variables)


@pytest.mark.parametrize(
    ("setting", "value", "needs"),
    [
        ("prefetch_size", "0", "an integer ≥ 1, or 'auto'"),
        ("prefetch", "maybe", "true or false"),
        ("memory_limit", "512 MiBs", "a size such as 512MiB"),
        ("preset", "D", "text that matches balanced|"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_would(
    setting: str, value: Any, needs: str, write: Write
) -> None:
    says = f"{setting} = {value!r}: must be .*{re.escape(needs)}"
    refused(f"command line --{says}", overrides={setting: value})
    refused(rf"\[loader\] {says}", write("a.json", json.dumps({"loader": {setting: value}})))
    refused(f"(?i)environment PENSTOCK_{says}", environment={f"PENSTOCK_{setting.upper()}": value})


# The loader's arguments


def test_a_loader_is_built_from_file_environment_and_arguments(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toml("data", kind="synthetic", num_samples=5)
    path = write("a.toml", toml("loader", batch_size=2, seed=1) + data)
    monkeypatch.setenv("NSA_FWE_Q", "3")
    made, arguments = build(path, None, {"seed": 4, "preset": "balanced", "preprocess": len})
    assert len(made) == 5
    expected = {"batch_size": 2, "seed": 4, "prefetch_size": 3, "n_workers": 2, "preprocess": len}
    assert expected.items() <= arguments.items()
    dataset = SyntheticDataset()
    assert build(path, dataset, {"prefetch": False})[0] is dataset
    assert build(path, dataset, {"prefetch": False, "n_workers": 4})[1]["n_workers"] == 0


def test_what_is_missing_is_named(write: Write) -> None:
    for how, says in (
        ({}, "batch_size=None: must be an integer ≥ 1"),
        ({"bach_size": 2}, r"argument bach_size: unknown; .* batch_size"),
    ):
        with pytest.raises(ConfigError, match=says):
            AsyncDataLoader.from_config(dataset=SyntheticDataset(), **how)
    with pytest.raises(ConfigError, match="no data: a"):
        AsyncDataLoader.from_config(write("a.toml", toml("loader", batch_size=2)))


# Data


def test_text_is_read_relative_to_the_file(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("parquet", "tokenizer.json"):
        (tmp_path / "deep" / name).symlink_to(corpus / name)
    about = {"urls": ["parquet"], "tokenizer": "tokenizer.json", "seq_len": 16}
    about |= {"chunk_bytes": "1MiB", "on_bad_record": "quarantine:bad.jsonl"}
    text = toml("loader", doc_batch=7) + toml("data", kind="text", **about)
    text += toml("data.remote", fetches=3, cache_bytes="1GiB")
    (tmp_path / "deep" / "a.toml").write_text(text)
    settings = load("deep/a.toml", environment={"NSA_FWE_REPORT_DOCS": "9"})
    assert settings.data is not None
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


TEXT = {"kind": "text", "urls": "x", "tokenizer": "byte", "seq_len": 8}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (toml("data", urls="x"), r"\[data\] kind = None: must be one of 'text', "),
        (toml("data", kind="text", urls="x"), "kind = 'text' needs tokenizer and seq_len"),
        (toml("data", **TEXT, seqlen=8), r"\[data\] seqlen: unknown; did you mean seq_len"),
        (toml("data", **TEXT, doc_batch=8), r"\[data\] doc_batch: unknown"),
        (MIXTURE.replace("seq_len", "seqlen"), r"needs seq_len"),
        (MIXTURE.replace("on_end", "at_end"), r"\[data\] at_end: unknown"),
        (toml("data", kind="text", mixture=3), "must have a table for each part"),
    ],
)
def test_what_data_does_not_take_is_refused(table: str, says: str, write: Write) -> None:
    refused(says, write("a.toml", table))


# The command


def table(done: Done) -> dict[str, list[str]]:
    assert done.exit_code == 0, done.stderr
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in done.stdout.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_config_shows_each_value_and_its_source(write: Write) -> None:
    data = {"kind": "synthetic", "seq_len": 9}
    write("a.json", json.dumps({"training": {"num_workers": 2, "batch_size": 8}, "data": data}))
    sets = ["--set", "seed=7", "--set", "memory_limit=512MiB"]
    done = run("config", "a.json", *sets, NSA_FWE_Q="4")
    rows = table(done)
    assert done.stdout.startswith("file a.json (given)\n")
    assert rows["prefetch_size"] == ["4", "environment NSA_FWE_Q"]
    assert rows["n_workers"] == ["2", "file a.json [training] num_workers"]
    assert rows["memory_limit"] == ["512MiB", "command line --set memory_limit"]
    assert rows["shuffle"] == ["auto", "default"]
    assert rows["data.seq_len"] == ["9", "file a.json [data]"]
    assert rows.keys() >= SETTINGS.keys()


SIGNED = "https://bob:PASSWD@host/{}?X-Sig=SECRETSIG#SECRETPART"
SECRET = f"""
[data]
seq_len = 9
kind = "text"
[data.mixture.one]
weight = 1
urls = "{SIGNED.format("a.jsonl")}"
tokenizer = "{SIGNED.format("tokenizer.json")}"
[data.mixture.many]
weight = 1
urls = ["{SIGNED.format("b.jsonl")}", "s3://KEY:PASSWD@bucket/c.jsonl", "https://bob:PASSWD@[host/d.jsonl?SECRETSIG"]
tokenizer = "byte"
"""
OPEN = ["https://host/b.jsonl", "s3://bucket/c.jsonl", "https://[host/d.jsonl"]


def test_config_shows_addresses_without_passwords_and_signatures(write: Write) -> None:
    write("a.toml", SECRET)
    sets = ["--json", "--set", "cpus=0-2"]
    plain = run("config", "a.toml")
    as_json = run("config", "a.toml", *sets, PENSTOCK_PRESET="balanced")
    rows, shown = table(plain), json.loads(as_json.stdout)
    assert rows["data.one.urls"][0] == "https://host/a.jsonl"
    assert json.loads(rows["data.many.urls"][0]) == OPEN
    parts = shown["data"]["parts"]
    assert parts["one"][0]["parameters"]["tokenizer"] == "https://host/tokenizer.json"
    assert parts["many"][0]["parameters"]["urls"] == OPEN
    for word in ("PASSWD", "SECRET", "KEY", "bob"):
        assert word not in plain.stdout + as_json.stdout
    assert (shown["file"], shown["file_from"], shown["preset"]) == ("a.toml", "given", "balanced")
    assert shown["settings"]["cpus"] == {"value": [0, 1, 2], "source": "command line --set cpus"}
    assert shown["settings"]["n_workers"] == {"value": 2, "source": "preset balanced"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--set", "seeed=1"), "command line --set seeed: unknown; did you mean seed?"),
        (("--set", "seed"), "command line --set seed: must be KEY=VALUE"),
        (("--preset", "D"), "command line --preset = 'D': must be text that matches balanced|"),
    ],
)
def test_config_ends_with_one_line_on_bad_input(args: tuple[str, ...], says: str) -> None:
    done = run("config", *args)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"penstock: {says}")
    assert done.stderr.count("\n") == 1
