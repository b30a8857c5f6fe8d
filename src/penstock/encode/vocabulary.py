"""Find a tokenizer's vocabulary and its special tokens.

A spec is "byte", a tokenizer.json or a folder with one, a .tiktoken file, a Hub name, or an object
of `tokenizers`, `transformers` or `tiktoken`. The result has all that
an engine needs, and can be pickled.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, missing_extra

EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>", "<|endofprompt|>",
)  # fmt: skip


class Encoding(NamedTuple):
    """The parts of an OpenAI encoding that its .tiktoken file lacks."""

    scheme: str
    """gigatoken's name for the pattern."""
    pattern: str
    """The regular expression that splits text into words."""
    specials: dict[str, int]


_R50K = Encoding(
    "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    {"<|endoftext|>": 50256},
)
ENCODINGS = {
    "gpt2": _R50K,
    "r50k_base": _R50K,
    "p50k_base": _R50K,
    "cl100k_base": Encoding(
        "gpt4",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        {"<|endoftext|>": 100257, "<|endofprompt|>": 100276},
    ),
    "o200k_base": Encoding(
        "o200k",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    ),
}
"""OpenAI's encodings, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary: a tokenizer.json, ranks or a `tiktoken.Encoding`; none of them for bytes."""

    name: str
    fingerprint: str
    specials: dict[str, int] = field(default_factory=dict)
    eos: str | None = None
    """The special token that ends a document, if the vocabulary names one."""
    tokenizer_json: str | None = None
    """Its content without special tokens, so that text which looks like one stays text."""
    ranks: bytes | None = None
    """The lines of a .tiktoken file."""
    encoding: Any = None

    @property
    def reference(self) -> str:
        """The engine that defines the ids of this vocabulary."""
        if self.tokenizer_json is not None:
            return "tokenizers"
        return "byte" if self.ranks is None and self.encoding is None else "tiktoken"

    def token_id(self, token: Any, role: str, size: int) -> int | None:
        """Return the id of a token given as the name of a special token or as an id."""
        if token is None:
            return None
        if isinstance(token, str) and token in self.specials:
            return self.specials[token]
        if isinstance(token, int | np.integer) and type(token) is not bool and 0 <= token < size:
            return int(token)
        raise ConfigError(
            f"{role}={token!r} is neither a special token of {self.name} "
            f"({', '.join(self.specials) or 'it has none'}) nor an id below {size}"
        )


def find_vocabulary(spec: Any) -> Vocabulary:
    """Return the vocabulary of a name, a path or a tokenizer object."""
    if isinstance(spec, str | os.PathLike):
        return _from_name(os.fspath(spec))
    library = type(spec).__module__.partition(".")[0]
    if library == "tiktoken":
        return _from_tiktoken(spec)
    if library == "tokenizers":
        return _from_json(spec.to_str(), f"tokenizers.{type(spec).__name__}")
    backend = getattr(spec, "backend_tokenizer", None)
    if backend is not None:
        name = str(getattr(spec, "name_or_path", "") or type(spec).__name__)
        return _from_json(backend.to_str(), name, eos=getattr(spec, "eos_token", None))
    raise ConfigError(
        f"cannot use {type(spec).__name__!r} as a tokenizer: give 'byte', a path, a Hub name, or an "
        "object of tokenizers, transformers (with use_fast=True) or tiktoken"
    )


def _from_name(name: str) -> Vocabulary:
    if name == "byte":
        return Vocabulary(name="byte", fingerprint="byte", specials={"<eos>": 256}, eos="<eos>")
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path.parent} has no tokenizer.json")
    if path.is_file():
        return _from_file(path, str(path))
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path or path.suffix in (".json", ".tiktoken"):
        raise ConfigError(f"{path} does not exist (looked from {Path.cwd()})")
    return _from_file(_download(name), name)


def _download(name: str) -> Path:
    """Return the tokenizer.json of a Hub name, from the local Hugging Face cache if present."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError as error:
        raise missing_extra("huggingface_hub", f"tokenizer={name!r} (a Hub name)", "hf") from error
    cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        found = Path(huggingface_hub.hf_hub_download(name, "tokenizer.json", etag_timeout=10))
        # It only names the end-of-text token, which other rules may find.
        with contextlib.suppress(EntryNotFoundError):
            huggingface_hub.hf_hub_download(name, "tokenizer_config.json", etag_timeout=10)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"tokenizer={name!r} is not a local file or in the local Hugging Face cache, and "
            f"its tokenizer.json could not be downloaded: {reason}. "
            "Pass the path of a tokenizer.json, or 'byte'."
        ) from error
    return found


def _from_file(path: Path, name: str) -> Vocabulary:
    content, eos = path.read_bytes(), None
    # The configuration next to it is optional: without it, other rules find the token.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((path.parent / "tokenizer_config.json").read_text("utf-8"))
        eos = config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
    try:
        if path.suffix == ".tiktoken":
            return _from_ranks(content, path)
        return _from_json(content.decode(), name, eos)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = path.suffix if path.suffix == ".tiktoken" else "tokenizer.json"
        raise ConfigError(f"{path} is not a {kind}: {error!r}") from error


def _from_json(text: str, name: str, eos: Any = None) -> Vocabulary:
    head, model = _split_model(text)
    added = head.get("added_tokens") or []
    specials = {t["content"]: int(t["id"]) for t in added if t.get("special")}
    post_processor = head.get("post_processor")
    if post_processor and post_processor["type"] != "ByteLevel":
        head["post_processor"] = None  # it adds special tokens, as eos= and bos= do
    head["added_tokens"] = [t for t in added if not t.get("special")]
    head["truncation"] = head["padding"] = None
    content = text.encode("utf-8", "surrogatepass")
    stripped = f'{json.dumps(head, ensure_ascii=False)[:-1]}, "model": {model}'
    return _vocabulary(name, content, specials, eos, tokenizer_json=stripped)


def _split_model(text: str) -> tuple[dict[str, Any], str]:
    """Split a tokenizer.json into its other fields, parsed, and its model as text.

    The model is most of the file. Parsing it and writing it again would delay the first batch by
    up to 0.2 s.
    """
    found = re.search(r'(?<!\\)"model"\s*:\s*\{', text)
    if found is not None:
        with contextlib.suppress(ValueError):  # the match was inside another value
            head = json.loads(f'{text[: found.start()]} "model": null}}')
            # The caller changes these, so none of them may follow the model.
            if head.keys() >= {"added_tokens", "post_processor", "truncation", "padding"}:
                del head["model"]
                return head, text[found.end() - 1 :]
    head = json.loads(text)
    return head, json.dumps(head.pop("model"), ensure_ascii=False) + "}"


def _from_ranks(ranks: bytes, path: Path) -> Vocabulary:
    name = path.name.removesuffix(".tiktoken")
    if name not in ENCODINGS:
        raise ConfigError(
            f"{path}: a .tiktoken file does not define how words are split, so its name must be "
            f"one of {', '.join(ENCODINGS)}; for any other vocabulary pass a tokenizer.json or a "
            "tiktoken.Encoding"
        )
    if not parse_ranks(ranks):
        raise ValueError("it is empty")
    return _vocabulary(name, ranks, ENCODINGS[name].specials, ranks=ranks)


def parse_ranks(ranks: bytes) -> dict[bytes, int]:
    """Return the tokens of a .tiktoken file with their ranks."""
    pairs = (line.split() for line in ranks.splitlines())
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def _from_tiktoken(encoding: Any) -> Vocabulary:
    specials = {
        name: encoding.encode_single_token(name) for name in sorted(encoding.special_tokens_set)
    }
    ranks = None
    if encoding.name in ENCODINGS:
        tokens = sorted((encoding.encode_single_token(t), t) for t in encoding.token_byte_values())
        ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in tokens)
    content = repr(encoding.__getstate__()).encode()
    return _vocabulary(encoding.name, content, specials, ranks=ranks, encoding=encoding)


def _vocabulary(
    name: str, content: bytes, specials: dict[str, int], eos: Any = None, **form: Any
) -> Vocabulary:
    """Return a vocabulary. `eos` is the token named by its configuration, if any."""
    fingerprint = hashlib.sha256(content).hexdigest()[:16]
    candidates = (eos, *EOS_NAMES) if isinstance(eos, str) else EOS_NAMES
    found = next((token for token in candidates if token in specials), None)
    return Vocabulary(name=name, fingerprint=fingerprint, specials=specials, eos=found, **form)
