"""Find a vocabulary, whatever it was named by.

In:    "byte", a tokenizer.json, a folder with one, a .tiktoken file, a Hub name, or an object of
       `tokenizers`, `transformers` or `tiktoken`.
Out:   a `Vocabulary`: what is needed to build an engine, and its special tokens.
Where: the thread that creates the dataset.
State: none.
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
from typing import Any

from penstock.errors import MissingExtra, TokenizerError

EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>", "<|endofprompt|>",
)  # fmt: skip

HEAD = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
}
"""What a tokenizer.json has besides its model, which usually comes last."""

TIKTOKEN = {
    "gpt2": ("gpt2", {"<|endoftext|>": 50256}),
    "r50k_base": ("gpt2", {"<|endoftext|>": 50256}),
    "p50k_base": ("gpt2", {"<|endoftext|>": 50256}),
    "cl100k_base": ("gpt4", {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}),
    "o200k_base": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""OpenAI's encodings: the way gigatoken splits words for each, and its special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary that has been found, in one of two forms, or none (bytes)."""

    name: str
    fingerprint: str
    specials: dict[str, int] = field(default_factory=dict)
    eos: str | None = None
    """The end-of-text token that comes with it, where that is known."""
    tokenizer_json: str | None = None
    """Without its special tokens, so that text which looks like one stays text."""
    ranks: bytes | None = None
    """The lines of a .tiktoken file."""
    encoding: Any = None
    """A `tiktoken.Encoding`."""

    def special(self, token: str | int | None, role: str, size: int) -> int | None:
        """The id of a special token given by name or number."""
        if token is None:
            return None
        if isinstance(token, str):
            if token not in self.specials:
                known = ", ".join(self.specials) or "none"
                raise TokenizerError(
                    f"{self.name} has no special token {token!r} for {role}; it has {known}"
                )
            return self.specials[token]
        if not 0 <= token < size:
            raise TokenizerError(f"{role}={token} is no id of {self.name}, which has {size}")
        return token


def find(spec: Any) -> Vocabulary:
    """The vocabulary that `spec` names or is."""
    if isinstance(spec, str | os.PathLike):
        return _by_name(os.fspath(spec))
    root = type(spec).__module__.partition(".")[0]
    if root == "tiktoken":
        return _from_tiktoken_object(spec)
    if root == "tokenizers":
        return _from_json(spec.to_str(), f"tokenizers.{type(spec).__name__}")
    backend = getattr(spec, "backend_tokenizer", None)
    if backend is not None:
        name = str(getattr(spec, "name_or_path", "") or type(spec).__name__)
        return _from_json(backend.to_str(), name, eos=getattr(spec, "eos_token", None))
    if root == "transformers":
        raise TokenizerError(
            f"{type(spec).__name__} is a slow tokenizer without a tokenizer.json: load it with use_fast=True"
        )
    raise TokenizerError(
        f"cannot use {type(spec).__name__!r} as a tokenizer: give 'byte', a path, a Hub name, or an "
        "object of tokenizers, transformers or tiktoken"
    )


def _by_name(name: str) -> Vocabulary:
    if name == "byte":
        return Vocabulary(name="byte", fingerprint="byte", specials={"<eos>": 256}, eos="<eos>")
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path.parent} has no tokenizer.json")
    if path.is_file():
        if path.suffix == ".tiktoken":
            return _from_tiktoken_file(path)
        return _from_json(path.read_text("utf-8"), str(path), eos=_configured_eos(path))
    if (
        path.suffix in (".json", ".tiktoken")
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    ):
        raise TokenizerError(f"{path} does not exist (looked from {Path.cwd()})")
    found = _from_hub(name)
    return _from_json(found.read_text("utf-8"), name, eos=_configured_eos(found))


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise MissingExtra("huggingface_hub", f"tokenizer={name!r} (a Hub name)", "hf") from error
    for repo in (name, *_LEGACY.get(name, ())):
        known = huggingface_hub.try_to_load_from_cache(repo, "tokenizer.json")
        if isinstance(known, str):
            return Path(known)
    repo = (*_LEGACY.get(name, ()), name)[0]
    try:
        found = Path(huggingface_hub.hf_hub_download(repo, "tokenizer.json", etag_timeout=10))
    except (HfHubHTTPError, EntryNotFoundError, OSError, ValueError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise TokenizerError(f"{repo} on the Hub has no tokenizer.json") from error
        raise TokenizerError(
            f"tokenizer={name!r} is no file here, is not in the local Hugging Face cache, and could not be "
            f"downloaded: {str(error).strip().splitlines()[0].rstrip('.')}. Give the path of a tokenizer.json, or 'byte'."
        ) from error
    # It only names the end-of-text token, which may be found without it.
    with contextlib.suppress(EntryNotFoundError, LocalEntryNotFoundError):
        huggingface_hub.hf_hub_download(repo, "tokenizer_config.json", etag_timeout=10)
    return found


_LEGACY = {"gpt2": ("openai-community/gpt2",)}


def _configured_eos(tokenizer_json: Path) -> str | None:
    """The end-of-text token that a tokenizer_config.json beside the vocabulary names."""
    try:
        config = json.loads((tokenizer_json.parent / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _from_json(text: str, name: str, eos: str | None = None) -> Vocabulary:
    try:
        head, model = behead(text)
        added = head.get("added_tokens") or []
        specials = {t["content"]: int(t["id"]) for t in added if t.get("special")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"{name} is not a tokenizer.json: {type(error).__name__}: {error}"
        ) from error
    head["added_tokens"] = [t for t in added if not t.get("special")]
    head["truncation"] = head["padding"] = None
    if _adds_specials(head.get("post_processor")):
        head["post_processor"] = None
    stripped = f'{json.dumps(head, ensure_ascii=False)[:-1]}, "model": {model}'
    if eos is None or eos not in specials:
        eos = next((token for token in EOS_NAMES if token in specials), None)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Vocabulary(
        name=name, fingerprint=digest, specials=specials, eos=eos, tokenizer_json=stripped
    )


def behead(text: str) -> tuple[dict[str, Any], str]:
    """Everything but the model, parsed, and the model as text, up to the end of the file.

    The model is nearly all of the file, and to parse and write it again takes a tenth of a second.
    """
    found = re.search(r'(?<!\\)"model"\s*:\s*\{', text)
    if found is not None:
        try:
            head = json.loads(f'{text[: found.start()]} "model": null}}')
            if set(head) >= HEAD:  # so nothing else can follow
                del head["model"]
                return head, text[found.end() - 1 :]
        except ValueError:
            pass  # that was not the model after all
    head = json.loads(text)
    return head, json.dumps(head.pop("model"), ensure_ascii=False) + "}"


def _adds_specials(post_processor: Any) -> bool:
    return bool(post_processor) and post_processor.get("type") != "ByteLevel"


def _from_tiktoken_file(path: Path) -> Vocabulary:
    name = path.name.removesuffix(".tiktoken")
    if name not in TIKTOKEN:
        raise TokenizerError(
            f"{path}: a .tiktoken file does not say how it splits words, so its name must be one of "
            f"{', '.join(TIKTOKEN)}; for any other vocabulary give a tokenizer.json or a tiktoken.Encoding"
        )
    ranks = path.read_bytes()
    specials = TIKTOKEN[name][1]
    try:
        if not ranks.strip():
            raise ValueError("it is empty")
        for line in ranks.splitlines():
            token, rank = line.split()
            base64.b64decode(token, validate=True), int(rank)
    except (ValueError, IndexError) as error:
        raise TokenizerError(f"{path} is not a .tiktoken file: {error}") from error
    return Vocabulary(
        name=name, fingerprint=hashlib.sha256(ranks).hexdigest()[:16], specials=dict(specials),
        eos="<|endoftext|>", ranks=ranks,
    )  # fmt: skip


def _from_tiktoken_object(encoding: Any) -> Vocabulary:
    ranks = b"".join(
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    )
    specials = dict(encoding._special_tokens)
    digest = hashlib.sha256(ranks + encoding._pat_str.encode()).hexdigest()[:16]
    eos = next((token for token in EOS_NAMES if token in specials), None)
    return Vocabulary(
        name=encoding.name, fingerprint=digest, specials=specials, eos=eos,
        ranks=ranks if encoding.name in TIKTOKEN else None, encoding=encoding,
    )  # fmt: skip
