"""A vocabulary in the form that loads soonest: the same ids, or not at all."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gigatoken
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from penstock.encode import check
from penstock.encode.engines import GigatokenEngine
from penstock.encode.tokenize import load_tokenizer
from penstock.encode.vocabulary import find
from tests.corpus import texts

TEXTS = [*check.PROBE, *texts()[:50]]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As GPT-2's: the special token comes last, and the others have the ids of their ranks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which nothing has been judged yet."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is long enough from its second or third call on."""
    monkeypatch.setattr(GigatokenEngine, "SETTLED", 1)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From which forms instances were loaded."""
    found: list[str] = []
    for form in ("from_json", "from_tiktoken"):
        usual: Callable[..., Any] = getattr(gigatoken.Tokenizer, form)

        def load(*args: Any, form: str = form, usual: Callable[..., Any] = usual) -> Any:
            found.append(form)
            return usual(*args)

        monkeypatch.setattr(gigatoken.Tokenizer, form, load)
    return found


def encode(engine: Any, some: list[str] = TEXTS) -> list[list[int]]:
    ids, offsets = engine.encode(pa.array(some, pa.large_string()))
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def look(path: Path) -> None:
    """A run that is long enough to look for another form."""
    engine = load_tokenizer(path, engine="gigatoken").engine
    for _ in range(4):
        encode(engine)


def notes(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (cache / "engines").iterdir()]


@pytest.mark.usefixtures("soon")
def test_the_next_run_loads_ranks_and_gives_the_same_ids(
    vocabulary: Path, cache: Path, loaded: list[str]
) -> None:
    look(vocabulary)
    (note,) = notes(cache)
    (kept,) = (cache / "ranks").iterdir()
    assert note["ranks"].startswith(kept.name.removesuffix(".tiktoken"))
    loaded.clear()
    fast = load_tokenizer(vocabulary, engine="gigatoken")
    assert encode(fast.engine) == encode(load_tokenizer(vocabulary, engine="tokenizers").engine)
    assert (fast.size, fast.eos_id) == (401, 400)
    assert loaded == ["from_tiktoken"]
    look(vocabulary)
    assert "from_json" not in loaded, "it is found once"
    assert encode(pickle.loads(pickle.dumps(fast.engine))) == encode(fast.engine)


@pytest.mark.usefixtures("cache")
def test_a_short_run_looks_for_nothing(vocabulary: Path, cache: Path, loaded: list[str]) -> None:
    look(vocabulary)
    assert [note["ranks"] for note in notes(cache)] == [None]
    assert not (cache / "ranks").exists()
    look(vocabulary)
    assert "from_tiktoken" not in loaded


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("damage", ["gone", "cut", "other", "empty"])
def test_ranks_that_are_not_whole_are_not_used(
    vocabulary: Path, cache: Path, loaded: list[str], damage: str
) -> None:
    look(vocabulary)
    (kept,) = (cache / "ranks").iterdir()
    lines = kept.read_bytes()
    if damage == "gone":
        kept.unlink()
    else:
        kept.write_bytes(
            {"cut": lines[:-20], "other": lines.replace(b" 300\n", b" 301\n"), "empty": b""}[damage]
        )
    loaded.clear()
    engine = load_tokenizer(vocabulary, engine="gigatoken").engine
    assert encode(engine) == encode(load_tokenizer(vocabulary, engine="tokenizers").engine)
    assert loaded == ["from_json"]


@pytest.mark.usefixtures("soon")
def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path,
    vocabulary: Path,
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.INFO, "penstock"):
        look(vocabulary)
    assert "is not kept as ranks" in caplog.text
    loaded.clear()
    look(vocabulary)
    assert "from_json" in loaded


@pytest.mark.usefixtures("soon")
def test_what_goes_wrong_with_ranks_hurts_no_run(
    vocabulary: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("a vocabulary of that kind")

    monkeypatch.setattr(check, "as_ranks", refuse)
    with caplog.at_level(logging.INFO, "penstock"):
        look(vocabulary)
    assert [note["ranks"] for note in notes(cache)] == [""]
    assert "is not kept as ranks (a vocabulary of that kind)" in caplog.text


def described(path: Path) -> tuple[dict[str, Any], Any]:
    """A vocabulary as `as_ranks` gets it, and gigatoken with it."""
    whole = find(path).tokenizer_json
    assert whole is not None
    return json.loads(whole), gigatoken.Tokenizer.from_json(whole)


OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "normalized": lambda it: it.update(normalizer={"type": "NFC"}),
    "words that are added": lambda it: it["added_tokens"].append(
        {"id": 400, "content": "<tool>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": False}),
    "a space first": lambda it: it["pre_tokenizer"].update(add_prefix_space=True),
    "not split": lambda it: it["pre_tokenizer"].update(use_regex=False),
    "split otherwise": lambda it: it.update(pre_tokenizer={"type": "Whitespace"}),
    "not split at all": lambda it: it.update(pre_tokenizer=None),
    "words that are whole": lambda it: it["model"].update(ignore_merges=True),
    "chance": lambda it: it["model"].update(dropout=0.1),
    "a mark at the end of words": lambda it: it["model"].update(end_of_word_suffix="</w>"),
    "bytes as a last resort": lambda it: it["model"].update(byte_fallback=True),
    "another kind of model": lambda it: it["model"].update(type="WordPiece"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_vocabulary_that_is_more_than_merges_has_no_ranks(vocabulary: Path, kind: str) -> None:
    about, tokenizer = described(vocabulary)
    assert check.as_ranks(json.dumps(about), tokenizer) is not None
    OTHERS[kind](about)
    assert check.as_ranks(json.dumps(about), tokenizer) is None


def bpe(path: Path, merges: list[tuple[str, str]], ids: list[str] | None = None) -> Path:
    """A vocabulary of all bytes and these merges; `ids`: what they make, in the order of their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = ids or list(dict.fromkeys(a + b for a, b in merges))
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate([*alphabet, *made])}, merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))
    return path


def test_ids_that_are_not_ranks_have_none(corpus: Path) -> None:
    about, tokenizer = described(corpus / "tokenizer.json")  # its special token comes first
    assert check.as_ranks(json.dumps(about), tokenizer) is None


SAME = [("a", "b"), ("c", "d"), ("ab", "cd"), ("ab", "c")]
ODD: dict[str, Any] = {
    "ids in another order": (SAME, ["cd", "ab", "abcd", "abc"]),
    "an id before those of its parts": ([("a", "b"), ("ab", "c")], ["abc", "ab"]),
    # "abc" comes of a + bc where the file says so, and would come of ab + c, whose parts come first.
    "a pair that ranks would not choose": ([("a", "b"), ("b", "c"), ("a", "bc")], None),
}


def test_merges_that_follow_from_their_ranks_have_ranks(tmp_path: Path) -> None:
    about, tokenizer = described(bpe(tmp_path / "same.json", SAME))
    assert check.as_ranks(json.dumps(about), tokenizer) is not None


@pytest.mark.parametrize("kind", ODD)
def test_merges_that_do_not_follow_from_their_ranks_have_none(tmp_path: Path, kind: str) -> None:
    merges, ids = ODD[kind]
    about, tokenizer = described(bpe(tmp_path / "odd.json", merges, ids))
    assert check.as_ranks(json.dumps(about), tokenizer) is None


UNREACHABLE = [("a", "b"), ("b", "c"), ("bc", "x"), ("a", "bcx")]
"""Its last token can be made of none of the others by their ranks, for which the library panics."""


@pytest.mark.usefixtures("soon")
def test_a_vocabulary_at_which_the_library_panics_hurts_no_run(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = bpe(tmp_path / "unreachable.json", UNREACHABLE)
    engine = load_tokenizer(path, eos=None, engine="gigatoken").engine
    with caplog.at_level(logging.INFO, "penstock"):
        given_by = [encode(engine, ["abcx bcx abc", "ab bc"]) for _ in range(4)]
    assert (
        given_by
        == [
            encode(
                load_tokenizer(path, eos=None, engine="tokenizers").engine,
                ["abcx bcx abc", "ab bc"],
            )
        ]
        * 4
    )
    assert [note["ranks"] for note in notes(cache)] == [""]
    assert "is not kept as ranks" in caplog.text


@pytest.mark.usefixtures("soon")
def test_ranks_that_vanish_while_they_are_loaded_are_done_without(
    vocabulary: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(vocabulary)
    monkeypatch.setattr(check, "_kept_ranks", lambda digest: cache / "ranks" / "gone.tiktoken")
    fast = load_tokenizer(vocabulary, engine="gigatoken").engine
    assert encode(fast) == encode(load_tokenizer(vocabulary, engine="tokenizers").engine)


@pytest.mark.usefixtures("soon")
def test_ranks_that_are_gone_are_made_again(vocabulary: Path, cache: Path) -> None:
    look(vocabulary)
    (kept,) = (cache / "ranks").iterdir()
    lines = kept.read_bytes()
    kept.unlink()
    look(vocabulary)
    assert kept.read_bytes() == lines


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("ranks", ["\0", "\ud800", "../x", "a" * 63, 5, [], {}])
def test_a_note_with_other_ranks_than_a_digest_counts_for_nothing(
    vocabulary: Path, cache: Path, ranks: Any
) -> None:
    look(vocabulary)
    (path,) = (cache / "engines").iterdir()
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"ranks": ranks}))
    look(vocabulary)
    assert json.loads(path.read_text()) == known


def test_many_calls_for_a_short_text_are_no_long_run(vocabulary: Path, cache: Path) -> None:
    engine = load_tokenizer(vocabulary, engine="gigatoken").engine
    for _ in range(100):
        encode(engine, ["short"])
    assert [note["ranks"] for note in notes(cache)] == [None]


@given(
    st.lists(
        st.tuples(st.text("abc", min_size=1, max_size=3), st.text("abc", min_size=1, max_size=3)),
        max_size=12,
    ),
    st.lists(st.text("abc ", max_size=12), min_size=1, max_size=8),
)
def test_ranks_give_the_same_ids_wherever_there_are_any(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], some: list[str]
) -> None:
    known, merges = set("abc"), []
    for left, right in dict.fromkeys(pairs):
        if {left, right} <= known:
            merges.append((left, right))
            known.add(left + right)
    about, tokenizer = described(bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json", merges))
    found = check.as_ranks(json.dumps(about), tokenizer)
    if found is not None:
        given_by = [
            encode(GigatokenEngine(lambda it=it: it, 0), some) for it in (tokenizer, found[1])
        ]  # type: ignore[misc]
        assert given_by[0] == given_by[1]
