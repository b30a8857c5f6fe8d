"""Settings: every name in every dialect, who wins, what is refused, and what `penstock config` says of it."""

from __future__ import annotations

import inspect
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock.dialects import without_comments
from penstock.recipe import build_dataset

from penstock.config import write_atomically
from penstock.errors import ConfigError
from penstock.settings import (
    KINDS,
    PASSED_ON,
    PRESETS,
    Resolved,
    Settings,
    build,
    load,
    loader_arguments,
    show,
)

ROOT = Path(__file__).parent.parent
Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is found in the working directory, and no variable in the environment."""
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
    ("telemetry", False, None, "telemetry", "telemetry"),
    ("autotune", True, None, "autotune", "autotune"),
]
BY_SETTING = [row[0] for row in NAMES]


@pytest.mark.parametrize(("setting", "value", "nsa", "in_toml", "in_json"), NAMES, ids=BY_SETTING)
def test_each_name_of_each_dialect_sets_its_setting(
    setting: str,
    value: Any,
    nsa: str | None,
    in_toml: str | None,
    in_json: str | None,
    write: Write,
) -> None:
    def check(resolved: Resolved, source: str) -> None:
        assert getattr(resolved.settings, setting) == value
        assert resolved.sources[setting] == source
        assert {name for name, where in resolved.sources.items() if where != "default"} == {setting}

    variable = f"PENSTOCK_{setting.upper()}"
    check(load(environment={variable: show(setting, value)}), f"environment {variable}")
    check(
        load(write("own.toml", toml("loader", **{setting: value})), environment={}),
        f"file own.toml [loader] {setting}",
    )
    check(load(overrides={setting: value}, environment={}), f"command line --{setting}")
    if nsa:
        check(load(environment={nsa: show(setting, value)}), f"environment {nsa}")
    if in_toml:
        path = write("two.toml", toml("training", **{in_toml: value}))
        check(load(path, environment={}), f"file two.toml [training] {in_toml}")
    if in_json:
        path = write("three.json", json.dumps({"training": {in_json: value}}))
        check(load(path, environment={}), f"file three.json training.{in_json}")


@pytest.mark.parametrize("setting", list(KINDS))
def test_every_setting_has_a_variable_and_a_line_in_the_docs(setting: str) -> None:
    assert load(
        environment={f"PENSTOCK_{setting.upper()}": show(setting, getattr(Settings(), setting))}
    )
    assert (
        f"| `{setting}` | `{setting.upper()}`" in (ROOT / "docs" / "configuration.md").read_text()
    )


def test_every_default_stands_in_the_example_file() -> None:
    written = (ROOT / "configs" / "penstock.toml").read_text()
    for setting in KINDS:
        assert re.search(rf"^(# )?{setting} = ", written, re.MULTILINE), setting
    every = re.sub(r"^# (\w+ = )", r"\1", written.partition("[data]")[0], flags=re.MULTILINE)
    import tomllib

    table = tomllib.loads(every)["loader"]
    given = {"batch_size", "shuffle", "seed", "epochs"}
    assert (
        Settings(**{key: value for key, value in table.items() if key not in given}) == Settings()
    )


def test_num_epochs_is_epochs_everywhere(write: Write) -> None:
    assert load(environment={"PENSTOCK_NUM_EPOCHS": "3"}).settings.epochs == 3
    assert load(overrides={"num-epochs": "3"}, environment={}).settings.epochs == 3
    assert load(write("a.toml", toml("loader", num_epochs=3)), environment={}).settings.epochs == 3


def test_without_anything_the_defaults_hold() -> None:
    resolved = load(
        environment={"HOME": "/home/someone", "PENSTOCK_CACHE": "x", "PENSTOCK_BENCH_DIR": "y"}
    )
    assert resolved.settings == Settings()
    assert set(resolved.sources.values()) == {"default"}
    assert (resolved.file, resolved.file_from, resolved.preset, resolved.data) == (
        None,
        "",
        None,
        None,
    )


def test_the_documents_own_examples_are_read(write: Write) -> None:
    path = write(
        "002.toml",
        "[training]\n# Async Data Loader\nuse_async_loader = true\nasync_n_workers = 4          # threads\n"
        "async_prefetch_size = 8      # batches\n",
    )
    two = load(path, environment={}).settings
    assert (two.prefetch, two.n_workers, two.prefetch_size) == (True, 4, 8)
    path = write(
        "003.json",
        '{\n  "training": {\n    "learning_rate": 0.001,\n    "batch_size": 32,\n    "num_epochs": 10,\n    \n'
        '    // Async DataLoader parameters (all optional)\n    "prefetch_batches": 4,    // How many\n'
        '    "num_workers": 4,          // Number of "threads"\n    "shuffle": true            // each epoch\n  }\n}\n',
    )
    three = load(path, environment={}).settings
    assert (three.learning_rate, three.batch_size, three.epochs) == (0.001, 32, 10)
    assert (three.prefetch_size, three.n_workers, three.shuffle) == (4, 4, True)


def test_a_trainers_own_tables_are_left_alone(write: Write) -> None:
    path = write(
        "a.json",
        '{"model": {"prefetch_size": "huge"}, "name": "x", "output": {"dir": "y"}, "training": {"seed": 1}}',
    )
    assert load(path, environment={}).settings == Settings(seed=1)


def test_loader_and_training_may_stand_in_one_file(write: Write) -> None:
    path = write("a.toml", toml("training", num_workers=2) + toml("loader", seed=3))
    assert load(path, environment={}).settings == Settings(n_workers=2, seed=3)


# Precedence


def test_command_line_over_environment_over_file_over_default(write: Write) -> None:
    path = write("a.toml", toml("loader", prefetch_size=2))
    variables = {"NSA_FWE_Q": "3"}
    options = {"prefetch_size": 4}
    where = "prefetch_size"
    cases = [
        (None, {}, {}, 8, "default"),
        (path, {}, {}, 2, "file a.toml [loader] prefetch_size"),
        (None, variables, {}, 3, "environment NSA_FWE_Q"),
        (path, variables, {}, 3, "environment NSA_FWE_Q"),
        (None, {}, options, 4, "command line --prefetch_size"),
        (path, {}, options, 4, "command line --prefetch_size"),
        (None, variables, options, 4, "command line --prefetch_size"),
        (path, variables, options, 4, "command line --prefetch_size"),
    ]
    for file, environment, overrides, value, source in cases:
        resolved = load(file, environment=environment, overrides=overrides)
        assert (getattr(resolved.settings, where), resolved.sources[where]) == (value, source)


def test_a_default_that_is_said_explicitly_still_wins(write: Write) -> None:
    path = write("a.toml", toml("loader", n_workers=2, shuffle=True))
    resolved = load(path, environment={"PENSTOCK_N_WORKERS": "auto"}, overrides={"shuffle": "auto"})
    assert (resolved.settings.n_workers, resolved.settings.shuffle) == (None, None)


def test_an_option_that_is_none_and_a_variable_that_is_empty_say_nothing(write: Write) -> None:
    path = write("a.toml", toml("loader", seed=5))
    assert (
        load(path, environment={"PENSTOCK_SEED": ""}, overrides={"seed": None}).settings.seed == 5
    )


def test_arguments_are_called_arguments() -> None:
    resolved = load(overrides={"seed": 1}, preset="A", environment={}, origin="argument {}")
    assert resolved.sources["seed"] == "argument seed"
    refused("argument preset = 'Z': needs one of", preset="Z", origin="argument {}")


def test_null_in_json_leaves_a_setting_open(write: Write) -> None:
    assert (
        load(write("a.json", '{"loader": {"epochs": null}}'), environment={}).settings.epochs
        is None
    )
    refused(
        "loader.seed = None: needs a whole number", write("b.json", '{"loader": {"seed": null}}')
    )


# Presets


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_sets_workers_and_prefetch(name: str, write: Write) -> None:
    path = write("a.toml", f'preset = "{name}"\n')
    for resolved in (
        load(preset=name, environment={}),
        load(environment={"PENSTOCK_PRESET": name}),
        load(path, environment={}),
        load(write("b.toml", toml("training", preset=name)), environment={}),
        load(overrides={"preset": name}, environment={}),
    ):
        assert (resolved.settings.n_workers, resolved.settings.prefetch_size) == PRESETS[name]
        assert (
            resolved.sources["n_workers"] == resolved.sources["prefetch_size"] == f"preset {name}"
        )
        assert resolved.preset == name


def test_a_preset_ranks_just_below_its_own_source(write: Write) -> None:
    path = write("a.toml", 'preset = "C"\n' + toml("loader", n_workers=3))
    in_file = load(path, environment={})
    assert (in_file.settings.n_workers, in_file.settings.prefetch_size) == (3, 8)
    assert in_file.sources["prefetch_size"] == "preset C"
    in_environment = load(path, environment={"PENSTOCK_PRESET": "A", "NSA_FWE_Q": "7"})
    assert (in_environment.settings.n_workers, in_environment.settings.prefetch_size) == (8, 7)
    on_command_line = load(
        path, environment={"PENSTOCK_PRESET": "A", "NSA_FWE_Q": "7"}, preset="balanced"
    )
    assert (on_command_line.settings.n_workers, on_command_line.settings.prefetch_size) == (2, 3)
    assert on_command_line.preset == "balanced"


# The file


def test_where_no_file_is_named_the_environment_or_the_folder_does(write: Write) -> None:
    write("penstock.toml", toml("loader", seed=1))
    named = write("named.toml", toml("loader", seed=2))
    found = load(environment={})
    assert (found.settings.seed, found.file, found.file_from) == (1, Path("penstock.toml"), "found")
    by_variable = load(environment={"PENSTOCK_CONFIG": "named.toml"})
    assert (by_variable.settings.seed, by_variable.file, by_variable.file_from) == (
        2,
        named,
        "PENSTOCK_CONFIG",
    )
    assert load("penstock.toml", environment={"PENSTOCK_CONFIG": "named.toml"}).settings.seed == 1


def test_a_file_that_cannot_be_read_is_named(write: Write, tmp_path: Path) -> None:
    refused("file gone.toml: cannot be read: No such file", "gone.toml")
    refused(
        r"gone.toml \(named by PENSTOCK_CONFIG\): cannot",
        environment={"PENSTOCK_CONFIG": "gone.toml"},
    )
    refused("needs a name that ends in .toml or .json", write("a.yaml", ""))
    (tmp_path / "latin.toml").write_bytes(b"# gr\xfc\xdfe")
    refused("latin.toml: is not UTF-8 at byte 4", "latin.toml")


def test_what_is_broken_is_named_with_its_line(write: Write) -> None:
    refused(
        r"a.toml: is not TOML: .*\(at line 2, column \d+\)",
        write("a.toml", "[loader]\nseed = = 3\n"),
    )
    refused(
        r"a.json: is not JSON: .*\(at line 3, column 9\)",
        write("a.json", '{ // one\n"loader": { // two\n"seed": x}}'),
    )
    refused(r"b.json: is not JSON: .*line 1", write("b.json", '{"training": {"seed": 1,}}'))
    refused("not an object: it is list", write("c.json", "[]"))
    refused("has the key 'seed' twice", write("d.json", '{"loader": {"seed": 1, "seed": 2}}'))
    refused("NaN", write("e.json", '{"training": {"learning_rate": NaN}}'))
    refused("e.toml: is not TOML: ", write("e.toml", "[loader]\nseed = 1\nseed = 2\n"))
    refused("loader = 3: needs a table", write("f.toml", "loader = 3"))
    refused("g.json: ", write("g.json", "[" * 100_000))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"loader": {"seed": 4}}')
    assert load("a.json", environment={}).settings.seed == 4


def test_comments_are_not_looked_for_in_strings() -> None:
    written = '{"a": "http://x", // note: "quoted"\n "b\\"//c": "\\\\", // "\n "d": 1 //}\n}'
    assert json.loads(without_comments(written)) == {"a": "http://x", 'b"//c': "\\", "d": 1}
    assert len(without_comments(written)) == len(written)


@given(
    st.recursive(
        st.text() | st.integers() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_without_comments_stays_as_it_is(value: Any) -> None:
    for written in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert without_comments(written) == written


@given(
    st.dictionaries(st.text(), st.text(), min_size=1),
    st.lists(st.text(st.characters(exclude_characters="\n\r")), min_size=1),
)
def test_a_comment_after_any_line_changes_nothing(
    value: dict[str, str], comments: list[str]
) -> None:
    lines = json.dumps(value, indent=1).split("\n")
    commented = [line + (f" // {comments[n % len(comments)]}") for n, line in enumerate(lines)]
    assert json.loads(without_comments("\n".join(commented))) == value


# Refusals


def test_an_unknown_name_is_refused_with_the_nearest(write: Write) -> None:
    refused(
        r"\[loader\] prefetch_sise: unknown; .* prefetch_size$",
        write("a.toml", toml("loader", prefetch_sise=3)),
    )
    refused(
        r"async_n_worker: unknown; .* async_n_workers$",
        write("b.toml", toml("training", async_n_worker=3)),
    )
    refused(
        r"training.prefetch_batch: unknown; .* prefetch_batches$",
        write("c.json", '{"training":{"prefetch_batch":3}}'),
    )
    refused(
        "environment PENSTOCK_SEEED: unknown; .* PENSTOCK_SEED$",
        environment={"PENSTOCK_SEEED": "1"},
    )
    refused(
        "environment PENSTOCK_CACHE_DIR: unknown; .* PENSTOCK_CACHE$",
        environment={"PENSTOCK_CACHE_DIR": ""},
    )
    refused(
        "environment NSA_FWE_WARMUP: unknown; .* NSA_FWE_WARMUP_",
        environment={"NSA_FWE_WARMUP": "1"},
    )
    refused("command line --shufle: unknown; .* shuffle$", overrides={"shufle": True})
    refused("zzz: unknown; known are autotune, batch_size, cpus, ", overrides={"zzz": True})


def test_a_name_of_another_dialect_is_translated(write: Write) -> None:
    refused(
        "async_n_workers: unknown; here it is called n_workers",
        write("a.toml", toml("loader", async_n_workers=3)),
    )
    refused(
        "PENSTOCK_Q: unknown; here it is called PENSTOCK_PREFETCH_SIZE",
        environment={"PENSTOCK_Q": "4"},
    )
    refused("--num-workers: unknown; here it is called n_workers", overrides={"num-workers": 4})


def test_names_gone_astray_are_refused(write: Write) -> None:
    refused(
        r"a.toml seed: stands outside a table; put it into loader", write("a.toml", "seed = 3\n")
    )
    refused(
        "num_workers: stands outside a table; put it into training",
        write("a.json", '{"num_workers": 3}'),
    )
    refused(
        "traning: unknown; the nearest known name is training",
        write("b.toml", toml("traning", seed=3)),
    )
    refused("has none of the tables", write("c.toml", toml("model", layers=3)))
    assert load(write("empty.toml", "# nothing yet\n"), environment={}).settings == Settings()


def test_a_setting_twice_in_one_file_is_refused_with_both_places(write: Write) -> None:
    path = write("a.toml", toml("training", num_workers=2) + toml("loader", n_workers=2))
    message = refused("are the same setting, n_workers", path)
    assert "[training] num_workers = 2" in message
    assert "[loader] n_workers = 2" in message
    refused(
        "are the same setting, n_workers",
        write("b.toml", toml("training", num_workers=2, async_n_workers=2)),
    )
    refused("are the same setting, epochs", overrides={"epochs": 1, "num_epochs": 2})
    refused(
        "are the same setting, preset",
        write("c.toml", 'preset = "A"\n' + toml("loader", preset="A")),
    )


def test_two_variables_may_agree_and_must_not_differ() -> None:
    agreeing = load(environment={"NSA_FWE_PREFETCH": "0", "PENSTOCK_PREFETCH": "off"})
    assert agreeing.settings.prefetch is False
    assert agreeing.sources["prefetch"] == "environment PENSTOCK_PREFETCH"
    message = refused(
        "same setting, prefetch_size", environment={"NSA_FWE_Q": "4", "PENSTOCK_PREFETCH_SIZE": "8"}
    )
    assert "environment NSA_FWE_Q = '4'" in message
    assert "environment PENSTOCK_PREFETCH_SIZE = '8'" in message


@pytest.mark.parametrize(
    ("setting", "value", "needs"),
    [
        ("prefetch_size", "lots", "a whole number, at least 1"),
        ("prefetch_size", 0, "a whole number, at least 1"),
        ("prefetch_size", 8.0, "a whole number, at least 1"),
        ("prefetch_size", True, "a whole number, at least 1"),
        ("prefetch_size", [8], "a whole number, at least 1"),
        ("n_workers", -1, "a whole number, at least 0, or 'auto'"),
        ("seed", "9" * 5000, "a whole number, at least 0"),
        ("prefetch", "maybe", "on or off"),
        ("prefetch", 2, "on or off"),
        ("prefetch", 1.0, "on or off"),
        ("shuffle", "", "on or off .*, or 'auto'"),
        ("warmup_timeout", -1, "a number of seconds, at least 0"),
        ("warmup_timeout", "inf", "a number of seconds, at least 0"),
        ("warmup_timeout", "nan", "a number of seconds, at least 0"),
        ("warmup_timeout", True, "a number of seconds, at least 0"),
        ("warmup_batches", "all", "a whole number, at least 0, or 'auto'"),
        ("learning_rate", {}, "a number, at least 0, or 'none'"),
        ("memory_limit", "512 MiBs", "a size such as 512MiB"),
        ("memory_limit", "512ib", "a size such as 512MiB"),
        ("memory_limit", 0, "a size such as 512MiB"),
        ("memory_limit", 1.5, "a size such as 512MiB"),
        ("workers", 4, "one of 'thread', 'process'; how many is n_workers"),
        ("output", "jax", "one of 'auto', 'torch', 'numpy'"),
        ("cpus", "3-0", "CPU numbers"),
        ("cpus", "0-99999999999", "CPU numbers"),
        ("cpus", [], "CPU numbers"),
        ("cpus", [-1], "CPU numbers"),
        ("cpus", "", "CPU numbers"),
        ("device", 0, "a device such as 'cpu'"),
        ("device", " ", "a device such as 'cpu'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_would(
    setting: str, value: Any, needs: str, write: Write
) -> None:
    shown = re.escape(repr(value))
    refused(f"command line --{setting} = {shown}: needs .*{needs}", overrides={setting: value})
    refused(
        f"loader.{setting} = {shown}: needs .*{needs}",
        write("a.json", json.dumps({"loader": {setting: value}})),
    )
    with pytest.raises(ConfigError, match=f"{setting} = {shown}: needs .*{needs}"):
        Settings(**{setting: value})
    if isinstance(value, str) and value:
        variable = f"PENSTOCK_{setting.upper()}"
        refused(f"environment {variable} = {shown}: needs", environment={variable: value})


@pytest.mark.parametrize(
    ("setting", "written", "value"),
    [
        *(("prefetch", word, True) for word in ("1", "true", "True", "on", "yes", 1, True)),
        *(("prefetch", word, False) for word in ("0", "false", "OFF", "no", 0, False)),
        ("n_workers", "auto", None),
        ("n_workers", "none", None),
        ("n_workers", "0", 0),
        ("warmup_batches", "auto", "auto"),
        ("warmup_timeout", "0", 0.0),
        ("memory_limit", "512MiB", 512 << 20),
        ("memory_limit", "1.5 gib", 3 << 29),
        ("memory_limit", "2GB", 2 * 10**9),
        ("memory_limit", "4096", 4096),
        ("cpus", "0-3,8", (0, 1, 2, 3, 8)),
        ("cpus", [2, 0, 2], (2, 0)),
        ("cpus", 1, (1,)),
        ("cpus", "None", None),
        ("device", "none", None),
        ("device", "cuda:1", "cuda:1"),
        ("learning_rate", "3e-4", 3e-4),
    ],
)
def test_what_a_value_may_look_like(setting: str, written: Any, value: Any) -> None:
    assert getattr(load(overrides={setting: written}, environment={}).settings, setting) == value


# Round trips


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


COUNTS = st.integers(1, 10**9)
ANY_SETTINGS = st.builds(
    Settings,
    prefetch=st.booleans(),
    prefetch_size=COUNTS,
    n_workers=_maybe(st.integers(0, 99)),
    workers=st.sampled_from(["thread", "process"]),
    restart_workers=st.booleans(),
    cpus=_maybe(st.lists(st.integers(0, 200), min_size=1)),
    numa_node=_maybe(st.integers(0, 9)),
    doc_batch=_maybe(COUNTS),
    report_docs=st.integers(0, 9999),
    warmup_batches=st.just("auto") | st.integers(0, 99),
    warmup_timeout=st.floats(0, 1e9),
    shuffle=_maybe(st.booleans()),
    seed=st.integers(0, 2**64),
    batch_size=_maybe(COUNTS),
    epochs=_maybe(COUNTS),
    learning_rate=_maybe(st.floats(0, 10)),
    lanes=_maybe(COUNTS),
    drop_last=_maybe(st.booleans()),
    device=_maybe(
        st.text(string.ascii_lowercase + ":0123456789", min_size=1).filter(
            lambda name: name != "none"
        )
    ),
    device_prefetch=COUNTS,
    output=st.sampled_from(["auto", "torch", "numpy"]),
    memory_limit=st.integers(1, 1 << 50) | st.integers(1, 999).map(lambda n: n << 20),
    pad=_maybe(st.integers(0, 99)),
    telemetry=st.booleans(),
    autotune=st.booleans(),
)
many = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)


@many
@given(ANY_SETTINGS)
def test_what_is_shown_can_be_written_anywhere(tmp_path: Path, wanted: Settings) -> None:
    text = {name: show(name, getattr(wanted, name)) for name in KINDS}
    (tmp_path / "a.toml").write_text(toml("loader", **text))
    (tmp_path / "b.json").write_text(json.dumps({"training": text}))
    variables = {f"PENSTOCK_{name.upper()}": value for name, value in text.items()}
    assert load(environment=variables).settings == wanted
    assert load(overrides=text, environment={}).settings == wanted
    assert load(tmp_path / "a.toml", environment={}).settings == wanted
    assert load(tmp_path / "b.json", environment={}).settings == wanted


@many
@given(ANY_SETTINGS)
def test_values_of_their_own_type_come_back_as_they_were(tmp_path: Path, wanted: Settings) -> None:
    values = {name: getattr(wanted, name) for name in KINDS}
    (tmp_path / "a.json").write_text(json.dumps({"loader": values}))
    assert load(tmp_path / "a.json", environment={}).settings == wanted
    assert Settings(**values) == wanted


@given(st.text(string.ascii_lowercase + "_", min_size=1), st.sampled_from(["loader", "training"]))
@many
def test_no_misspelt_name_passes(tmp_path: Path, key: str, table: str) -> None:
    from penstock.dialects import EVERYWHERE, TRAINING

    if key in {*KINDS, *EVERYWHERE, *TRAINING, "preset"}:
        return
    (tmp_path / "a.json").write_text(json.dumps({table: {key: 1}}))
    refused(f"{table}.{key}: unknown", tmp_path / "a.json")


# The loader's arguments


def test_prefetch_off_is_the_loader_without_threads() -> None:
    assert loader_arguments(Settings(batch_size=2, n_workers=4))["n_workers"] == 4
    assert loader_arguments(Settings(batch_size=2, n_workers=4, prefetch=False))["n_workers"] == 0


def test_shuffle_that_is_left_open_is_left_to_the_loader() -> None:
    assert loader_arguments(Settings(batch_size=2))["shuffle"] is None
    assert loader_arguments(Settings(batch_size=2, shuffle=False))["shuffle"] is False


def test_a_text_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "kept.json", "half \ud800")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "kept.json", "half \ud800", best_effort=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert (tmp_path / "kept.json").read_text() == "before"


def test_a_loader_needs_a_batch_size() -> None:
    with pytest.raises(ConfigError, match="batch_size: is given nowhere"):
        loader_arguments(Settings())


def test_the_arguments_are_the_loaders_own() -> None:
    from penstock import AsyncDataLoader

    known = inspect.signature(AsyncDataLoader).parameters
    arguments = loader_arguments(Settings(batch_size=1, shuffle=True))
    assert {"dataset", *arguments, *PASSED_ON} == known.keys()
    for name, value in loader_arguments(Settings(batch_size=1)).items():
        assert name == "batch_size" or known[name].default == value, f"{name} has two defaults"


def test_a_loader_is_built_from_file_environment_and_arguments(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        "a.toml",
        toml("loader", batch_size=2, seed=1) + toml("data", kind="synthetic", num_samples=5),
    )
    monkeypatch.setenv("NSA_FWE_Q", "3")
    sentinel = object()
    data, arguments = build(path, None, {"seed": 4, "preset": "balanced", "preprocess": sentinel})
    assert len(data) == 5
    assert (arguments["batch_size"], arguments["seed"], arguments["prefetch_size"]) == (2, 4, 3)
    assert (arguments["n_workers"], arguments["preprocess"]) == (2, sentinel)
    assert build(path, sentinel)[0] is sentinel


def test_a_loader_may_be_tuned_and_not_measured_by_settings(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock import AsyncDataLoader, Telemetry

    own = Telemetry(stall_s=7)
    path = write(
        "a.toml",
        toml("loader", batch_size=2, autotune=True) + toml("data", kind="synthetic", num_samples=5),
    )
    with AsyncDataLoader.from_config(path, telemetry=own) as loader:
        assert loader.telemetry is own
        assert loader._tuner is not None
    monkeypatch.setenv("PENSTOCK_AUTOTUNE", "off")
    assert AsyncDataLoader.from_config(path, telemetry="off").telemetry.on is False
    monkeypatch.setenv("PENSTOCK_AUTOTUNE", "on")
    with pytest.raises(
        ConfigError, match="autotune=True follows what is measured: it needs telemetry=True"
    ):
        AsyncDataLoader.from_config(path)
    with pytest.raises(ConfigError, match=r"argument telemetry = 3\.5: needs on or off"):
        AsyncDataLoader.from_config(path, telemetry=3.5)


def test_a_loader_without_data_says_what_is_missing(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"no data: file a\.toml has no table data"):
        build(write("a.toml", toml("loader", batch_size=2)))
    with pytest.raises(ConfigError, match="no data: no file is named"):
        build(overrides={"batch_size": 2})
    with pytest.raises(
        ConfigError, match="argument bach_size: unknown; the nearest known name is batch_size"
    ):
        build(overrides={"bach_size": 2})


@pytest.mark.parametrize(
    "name", ["penstock.toml", "test_async_loader.toml", "autoregressive_training.json"]
)
def test_the_example_files_give_the_same_batches_with_and_without_threads(name: str) -> None:
    import numpy as np

    from penstock import AsyncDataLoader

    def first(**overrides: Any) -> list[Any]:
        with AsyncDataLoader.from_config(ROOT / "configs" / name, **overrides) as loader:
            return [next(loader).inputs for _ in range(4)]

    for with_threads, without in zip(first(preset="C"), first(prefetch=False), strict=True):
        np.testing.assert_array_equal(with_threads, without)


# Data


def test_text_is_read_relative_to_the_file(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "parquet").symlink_to(corpus / "parquet")
    (tmp_path / "deep" / "tokenizer.json").symlink_to(corpus / "tokenizer.json")
    (tmp_path / "deep" / "a.toml").write_text(
        toml("loader", doc_batch=7)
        + toml(
            "data",
            kind="text",
            urls=["parquet"],
            tokenizer="tokenizer.json",
            seq_len=16,
            chunk_bytes="1MiB",
        )
    )
    resolved = load("deep/a.toml", environment={})
    assert resolved.data is not None
    assert resolved.data.where == "file deep/a.toml [data]"
    assert resolved.data.parameters["urls"] == [str(tmp_path / "deep" / "parquet")]
    data = build_dataset(resolved.data, doc_batch=resolved.settings.doc_batch)
    assert (data.seq_len, data.doc_batch) == (16, 7)


@pytest.mark.parametrize("name", ["byte", "gpt2", "meta-llama/Llama-3", "hf://x/tokenizer.json"])
def test_a_vocabulary_that_is_no_file_keeps_its_name(name: str, write: Write) -> None:
    path = write(
        "a.toml", toml("data", kind="text", urls="s3://bucket/x", tokenizer=name, seq_len=8)
    )
    data = load(path, environment={}).data
    assert data is not None
    assert data.parameters["tokenizer"] == name
    assert data.parameters["urls"] == "s3://bucket/x"


def test_tokens_and_synthetic_data_by_name(write: Write, tmp_path: Path) -> None:
    import numpy as np

    np.arange(100, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    path = write(
        "a.json", '{"data": {"kind": "tokens", "path": "ids.bin", "seq_len": 9, "dtype": "uint16"}}'
    )
    data = load(path, environment={}).data
    assert data is not None
    assert len(build_dataset(data)) > 0
    path = write(
        "b.toml", toml("data", kind="synthetic", vocab_size=50, seq_len=8, num_samples=12, seed=1)
    )
    data = load(path, environment={}).data
    assert data is not None
    assert len(build_dataset(data)) == 12


MIXTURE = """
[data]
kind = "text"
tokenizer = "byte"
seq_len = 8
on_end = "leave"
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
    assert (data.kind, data.parameters) == ("mixture", {"on_end": "leave"})
    (web, web_weight), (made, made_weight) = data.parts["web"], data.parts["made"]
    assert (web.kind, web_weight, made.kind, made_weight) == ("text", 0.7, "synthetic", 1.0)
    assert web.parameters == {"tokenizer": "byte", "seq_len": 8, "urls": str(tmp_path / "web")}
    assert made.parameters == {"seq_len": 8, "vocab_size": 257}


def test_a_mixture_streams_from_both_parts(write: Write, tmp_path: Path, corpus: Path) -> None:
    from penstock import AsyncDataLoader

    (tmp_path / "web").symlink_to(corpus / "parquet")
    path = write("a.toml", MIXTURE + "num_samples = 40\n[loader]\nbatch_size = 8\n")
    data = load(path, environment={}).data
    assert data is not None
    assert {name: weight for name, (_, weight) in build_dataset(data).parts.items()} == {
        "web": 0.7,
        "made": 1.0,
    }
    with AsyncDataLoader.from_config(path) as loader:
        files = {span.file for _ in range(3) for row in next(loader).provenance() for span in row}
    assert len(files) >= 2
    path = write("b.toml", MIXTURE.replace("leave", "explode"))
    data = load(path, environment={}).data
    assert data is not None
    with pytest.raises(ConfigError, match=r"file b\.toml \[data\]: on_end='explode': needs one of"):
        build_dataset(data)


def test_what_data_does_not_take_is_refused(write: Write) -> None:
    text = {"kind": "text", "urls": "x", "tokenizer": "byte", "seq_len": 8}
    refused(r"\[data\]: needs a kind, one of 'text'", write("a.toml", toml("data", urls="x")))
    refused(
        r"\[data\] kind = 'txt': must be one of 'text', ", write("a.toml", toml("data", kind="txt"))
    )
    refused(
        r"\[data\] seq_length: unknown; .* seq_len$",
        write("a.toml", toml("data", **text, seq_length=8)),
    )
    refused(
        r"\[data\]: kind = 'text' needs urls and tokenizer and seq_len",
        write("a.toml", toml("data", kind="text")),
    )
    refused(r"\[data\] doc_batch: is a setting", write("a.toml", toml("data", **text, doc_batch=8)))
    refused(
        r"\[data\] chunk_bytes = '4 potatoes': needs",
        write("a.toml", toml("data", **text, chunk_bytes="4 potatoes")),
    )
    refused(
        r"\[data\] on_end: is for a mixture", write("a.toml", toml("data", **text, on_end="stop"))
    )
    refused("needs a weight", write("a.toml", MIXTURE.replace("weight = 0.7\n", "")))
    refused(r"web\] weight = -1: needs a number", write("a.toml", MIXTURE.replace("0.7", "-1")))
    refused(r"web\] url: unknown; .* urls$", write("a.toml", MIXTURE.replace("urls", "url")))
    refused(
        r"\[data\] tokeniser: unknown; .* tokenizer$",
        write("a.toml", MIXTURE.replace("on_end", "tokeniser")),
    )
    refused("needs a table for each part", write("a.toml", toml("data", mixture=3)))
    refused(r"made\] doc_batch: is a setting", write("a.toml", MIXTURE + "doc_batch = 3\n"))


def test_a_dataset_that_refuses_its_parameters_says_which_table(write: Write) -> None:
    path = write(
        "a.toml", toml("data", kind="text", urls="x", tokenizer="byte", seq_len=8, packing="tight")
    )
    data = load(path, environment={}).data
    assert data is not None
    with pytest.raises(ConfigError, match=r"file a.toml \[data\]: packing='tight': needs one of"):
        build_dataset(data)


@pytest.mark.parametrize(
    "name", ["penstock.toml", "test_async_loader.toml", "autoregressive_training.json"]
)
def test_the_example_files_work(name: str) -> None:
    resolved = load(ROOT / "configs" / name, environment={})
    assert loader_arguments(resolved.settings)["batch_size"] >= 8
    assert resolved.data is not None
    assert build_dataset(resolved.data) is not None


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
    assert done.stdout.startswith("file a.json, as given\n")
    assert rows["prefetch_size"] == ["4", "environment NSA_FWE_Q"]
    assert rows["n_workers"] == ["2", "file a.json training.num_workers"]
    assert rows["seed"] == ["7", "command line --set seed"]
    assert rows["memory_limit"] == ["512MiB", "command line --set memory_limit"]
    assert rows["shuffle"] == ["auto", "default"]
    assert rows["data.seq_len"] == ["9", "file a.json data"]
    assert rows.keys() >= KINDS.keys()


def test_config_says_which_file_it_found(write: Write, tmp_path: Path) -> None:
    assert command(cwd=tmp_path).stdout.startswith("no file\n")
    write("penstock.toml", 'preset = "C"\n')
    found = command(cwd=tmp_path)
    assert found.stdout.startswith("file penstock.toml, found in this folder\n")
    assert table(found)["n_workers"] == ["12", "preset C"]
    named = command("--preset", "A", cwd=tmp_path, PENSTOCK_CONFIG="penstock.toml")
    assert named.stdout.startswith("file penstock.toml, named by PENSTOCK_CONFIG\n")
    assert table(named)["n_workers"] == ["8", "preset A"]


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
            "command line --set seeed: unknown; the nearest known name is seed",
        ),
        (("--set", "seed"), {}, "command line --set seed: needs KEY=VALUE"),
        (("--preset", "D"), {}, "command line --preset = 'D': must be one of 'balanced'"),
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
