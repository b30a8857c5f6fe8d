"""Vocabularies are found whatever they are named by, and every engine gives the reference's ids."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import TextDataset
from penstock.encode.engines import GigatokenEngine, by_document
from penstock.encode.tokenizer import Tokenizer, load_tokenizer
from penstock.errors import ConfigError
from tests.corpus import train_vocabulary
from tests.reading import ids_of, open_loader, write_jsonl

EOS = "<|endoftext|>"

HOSTILE = {
    "english": "The quick brown fox can't jump; they'll WE'VE I'd 12,345.67 — it's \"done\".",
    "code": "def f(x):\r\n\treturn {'a': [1, 2]}  # naïve\n\n\n    pass\n",
    "control characters": "".join(map(chr, [*range(32), *range(127, 160)])) + "a\0b\0\0c",
    "runs": "a" * 5000 + " " * 3000 + "\n" * 2000 + "1" * 1000 + "!" * 999 + "é" * 777 + "🙂" * 500,
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 🇩🇪🇫🇷 ❤️‍🔥 \U0001fae0",
    "right to left": "עִבְרִית العربية ‏\u202bmixed\u202c 123 \u200f.",
    "scripts": "Ελληνικά русский हिन्दी ภาษาไทย 日本語テキスト 中文，한국어 ქართული ᏣᎳᎩ",
    "combining": "e\u0301 " + "Z" + "\u0300\u0301\u0302" * 40 + " \u0345ͅ ẛ̣ ﬁ ½ ² ① Ⅷ",
    "spaces": " \u00a0\u1680\u2000\u2028\u2029\u202f\u205f\u3000\u200b\ufeff\u0085 x  y   z\t\t ",
    "edges": "\ud7ff\ue000\uffff\U00010000\U0010ffff\ufffd\ufdd0",
    "contractions": "'s 't 're 've 'm 'll 'd 'S 'T ''s 's's x's ’s 'ſ",
    "digits": "0 00 000 0000 1e10 3.14 ١٢٣ ４５６ ²³",
    "looks special": f"{EOS}<|im_start|>user</s><s>[INST] <pad> x{EOS}y {EOS[:-1]}",
    "space first": " leading",
    "newline": "\n",
    "one": "x",
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    # Merges across all of it, its long runs included.
    texts = [*HOSTILE.values()] * 3 + [unicodedata.name(chr(c), "") for c in range(3000)]
    return train_vocabulary(path, 1200, texts, ["<|start|>"])


@pytest.fixture(scope="module")
def gigatoken(vocabulary: Path) -> Tokenizer:
    """One engine for many examples."""
    return load_tokenizer(vocabulary, engine="gigatoken")


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode short streams as the later text of a long one."""
    monkeypatch.setattr(GigatokenEngine, "FIRST_BYTES", 0)


def reference(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of the `tokenizers` library, special tokens being text like any other."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [
        encoded.ids
        for encoded in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of an engine, without separators: of single documents and of a batch."""
    found = []
    for first_bytes in (1 << 40, 0):
        GigatokenEngine.FIRST_BYTES = first_bytes
        encoded = tokenizer.engine.encode(pa.array(texts, pa.large_string()))
        found.append([[*map(int, ids)] for ids in by_document(encoded)])
    assert found[0] == found[1]
    return found[1]


def stream(folder: Path, texts: Sequence[str], n_workers: int = 0, **settings: Any) -> list[int]:
    """The ids that a dataset of these texts yields."""
    path = write_jsonl(folder / "texts.jsonl", texts)
    dataset = TextDataset(path, **{"seq_len": 64, "chunk_bytes": 1024, **settings})
    with open_loader(dataset, n_workers=n_workers) as loader:
        got: list[int] = ids_of(loader).tolist()
        return got


def joined(
    ids: Sequence[Sequence[int]], eos: Sequence[int] = (0,), bos: Sequence[int] = ()
) -> list[int]:
    """Documents one after another, each with its separators."""
    return [i for doc in ids for i in (*bos, *doc, *eos)]


# The reference's ids


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.lists(
        st.text(max_size=80) | st.text("a '1s\n\t éЖ漢🙂\u0301\u200d", max_size=80), max_size=6
    )
)
def test_any_text_gets_the_ids_of_the_reference(
    vocabulary: Path, gigatoken: Tokenizer, texts: list[str]
) -> None:
    assert encode(gigatoken, ["", *texts]) == reference(vocabulary, ["", *texts])


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
@pytest.mark.parametrize("n_workers", [0, 3])
def test_a_stream_is_the_reference_with_a_separator_after_each_document(
    tmp_path: Path, vocabulary: Path, engine: str, n_workers: int
) -> None:
    texts = [*HOSTILE.values()] * 5
    got = stream(tmp_path, texts, n_workers, tokenizer=load_tokenizer(vocabulary, engine=engine))
    assert got == joined(reference(vocabulary, texts))


def test_text_that_looks_like_a_special_token_stays_text(tmp_path: Path, vocabulary: Path) -> None:
    texts = [EOS, f"a{EOS}b", "<|start|>"]
    got = stream(tmp_path, texts, tokenizer=vocabulary)
    # The one special id there is stands where a document ends.
    assert [i for i in got if i < 2] == [0, 0, 0]
    assert tokenizers.Tokenizer.from_file(str(vocabulary)).decode(got) == "".join(texts)


# Separators


@pytest.mark.parametrize(
    ("policy", "bos", "eos"),
    [
        ({"eos": None}, (), ()),
        ({"eos": "<|start|>"}, (), (1,)),
        ({"eos": 7}, (), (7,)),
        ({"bos": "<|start|>"}, (1,), (0,)),
        ({"bos": 1, "eos": 1}, (1,), (1,)),
    ],
    ids=str,
)
def test_separators_stand_where_they_are_asked_for(
    tmp_path: Path,
    vocabulary: Path,
    policy: dict[str, Any],
    bos: tuple[int, ...],
    eos: tuple[int, ...],
) -> None:
    texts = ["one", "", "two words", "x"]
    wanted = [ids for ids in reference(vocabulary, texts) if ids]
    assert stream(tmp_path, texts, tokenizer=vocabulary, **policy) == joined(wanted, eos, bos)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"eos": "<|nope|>"}, r"eos='<\|nope\|>' is neither a .* \(<\|endoftext\|>, <\|start\|>\)"),
        ({"bos": "the"}, "bos='the' is neither a special token"),
        ({"eos": 10**6}, r"eos=1000000 is neither .* nor an id below 1200"),
        ({"bos": -1}, "bos=-1 is neither"),
        ({"eos": [0]}, r"eos=\[0\] is neither"),
        ({"bos": True}, "bos=True is neither"),
    ],
    ids=str,
)
def test_a_separator_that_does_not_exist_is_refused(
    vocabulary: Path, policy: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(vocabulary, **policy)


# Naming a vocabulary


@pytest.mark.parametrize("eos", ["<|start|>", {"content": "<|start|>", "special": True}])
def test_a_config_beside_it_names_the_end_of_text(
    tmp_path: Path, vocabulary: Path, eos: Any
) -> None:
    shutil.copy(vocabulary, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(tmp_path).eos_id == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.json", None, r"gone\.json does not exist \(looked from"),
        ("sub/folder/gone", None, "does not exist"),
        ("broken.json", "{", "is not a tokenizer.json"),
        ("other.json", '{"text": 1}', "is not a tokenizer.json"),
        ("mine.tiktoken", "YQ== 0\n", r"its name must be one of gpt2, r50k_base.*pass a tokenizer"),
    ],
)
def test_a_path_that_is_not_a_vocabulary_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path / name)


def test_an_object_that_is_no_tokenizer_says_what_would_be() -> None:
    for thing in (None, 42, b"byte", ["byte"], len):
        with pytest.raises(ConfigError, match="give 'byte', a path, a Hub name, or an object of"):
            load_tokenizer(thing)


# Other models


def word_level(folder: Path, words: int) -> Path:
    vocab = {EOS: 0, "<unk>": 1} | {f"w{i}": i + 2 for i in range(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([EOS])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_ids_beyond_16_bits_are_exact(tmp_path: Path) -> None:
    path = word_level(tmp_path, 70_000)
    texts = ["w0 w65533 w65534 w65535", "w69999 unknown"]
    assert stream(tmp_path, texts, tokenizer=path) == [2, 65535, 65536, 65537, 0, 70_001, 1, 0]


# tiktoken

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def ranks() -> dict[bytes, int]:
    """Each byte, and some merges, so that every longer token is made of two before it."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b" t", b"he", b"in", b"th", b" th", b" the", b"er", b"\xc3\xa9", b"aa", b"aaaa"]
    tokens += [b"  ", b"    ", b"\n\n"]
    return {token: rank for rank, token in enumerate(tokens)}


def encoding(name: str) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks(), special_tokens={EOS: 50256}
    )


def write_ranks(path: Path) -> Path:
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())
    )
    return path


@pytest.mark.parametrize("engine", ["auto", "gigatoken", "tiktoken"])
def test_a_tiktoken_file_gives_the_ids_of_tiktoken(tmp_path: Path, engine: str) -> None:
    path = write_ranks(tmp_path / "r50k_base.tiktoken")
    texts = [*HOSTILE.values(), "the other thing in there"]
    wanted = [encoding("r50k_base").encode_ordinary(text) for text in texts]
    assert stream(tmp_path, texts, tokenizer=load_tokenizer(path, engine=engine)) == joined(
        wanted, (50256,)
    )


# Objects


def test_an_object_of_transformers_gives_its_own_ids_and_end_of_text(
    tmp_path: Path, vocabulary: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(vocabulary), eos_token="<|start|>")
    texts = [text for kind, text in HOSTILE.items() if kind != "looks special"]
    wanted = [made.encode(text, add_special_tokens=False) for text in texts]
    assert stream(tmp_path, texts, tokenizer=made) == joined(wanted, (1,))


@pytest.mark.parametrize("name", ["byte", "gigatoken", "tokenizers", "tiktoken"])
def test_decode_gives_the_text_back(tmp_path: Path, vocabulary: Path, name: Any) -> None:
    ranks_file = write_ranks(tmp_path / "gpt2.tiktoken")
    spec = {"byte": "byte", "tiktoken": ranks_file}.get(name, vocabulary)
    made = load_tokenizer(spec, engine="auto" if name == "byte" else name)
    text = "naïve 日本 <pad>"
    (ids,) = encode(made, [text])
    assert made.eos_id is not None
    assert made.decode([*ids, made.eos_id]) == text + made.decode(np.array([made.eos_id]))
    with pytest.raises(ConfigError, match="has no token for"):
        made.decode([made.vocab_size])


# Names on the Hub, in the cache of huggingface_hub

LOAD = """
import json, socket, sys
def connect(*_):
    raise SystemExit("a connection was tried")
socket.socket.connect = socket.getaddrinfo = connect
from penstock.errors import ConfigError
from penstock.encode.tokenizer import load_tokenizer
try:
    made = load_tokenizer(sys.argv[1])
    print(json.dumps([made.eos_id, made.vocab_size, made.vocabulary.name]))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def load_from_hub(name: str, cache: Path, **environment: str) -> Any:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_HOME": str(cache), **environment}
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, name], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def put_in_cache(cache: Path, repo: str, *files: Path) -> None:
    """The layout that huggingface_hub gives its cache."""
    folder = cache / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "snapshots" / ("0" * 40) / file.name)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_name_in_the_local_cache_needs_no_connection(
    tmp_path: Path, vocabulary: Path, offline: str
) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "<|start|>"}')
    put_in_cache(tmp_path, "someone/tiny", vocabulary, config)
    loaded = load_from_hub("someone/tiny", tmp_path, HF_HUB_OFFLINE=offline)
    assert loaded == [1, 1200, "someone/tiny"]


def test_a_hub_name_that_is_nowhere_says_what_to_do(tmp_path: Path) -> None:
    message = load_from_hub("someone/nothing", tmp_path, HF_HUB_OFFLINE="1")
    assert "'someone/nothing' is not a local file or in the local Hugging Face cache" in message
    assert "Pass the path of a tokenizer.json" in message


# An engine is checked against the reference before it is used


def test_an_engine_with_other_ids_is_not_used_and_the_log_says_so(
    tmp_path: Path,
    vocabulary: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))  # no engine was checked yet
    sound = GigatokenEngine.encode

    def encode(self: GigatokenEngine, texts: Any) -> Any:
        ids, offsets = sound(self, texts)
        return np.where(ids == 70, 71, ids), offsets

    monkeypatch.setattr(GigatokenEngine, "encode", encode)
    texts = [*HOSTILE.values()]
    got = stream(tmp_path, texts, tokenizer=vocabulary)
    assert got == joined(reference(vocabulary, texts))
    assert 70 in got
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "differ from those of tokenizers" in warning
    assert "using tokenizers" in warning
