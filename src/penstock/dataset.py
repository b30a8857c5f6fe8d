"""TextDataset: text somewhere, how it is tokenized and packed. A description; nothing runs yet.

In:    paths or addresses, and settings.
Out:   what a `Pipeline` needs, and fingerprints for the state.
Where: the thread that creates it. Any number of loaders may share one.
State: none: it lists files and loads the vocabulary (the one while the other is under way), and opens
       no data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.config import cache_dir, one_of, whole_number
from penstock.errors import ConfigError, StateFormat
from penstock.read.attempt import Remote
from penstock.read.manifest import fingerprint, list_files
from penstock.read.settings import ReadSettings
from penstock.types import (
    AUTO,
    WORD_CACHE_BYTES,
    Address,
    FileRef,
    Format,
    GiB,
    KiB,
    MiB,
    OnBadRecord,
    Packing,
)

if TYPE_CHECKING:
    from penstock.encode.tokenizer import Tokenizer
    from penstock.sources.network import Outside
    from penstock.sources.text import PackSettings
    from penstock.sources.text_stream import TextStream

Path = str | os.PathLike[str]


def any_remote(urls: Any) -> bool:
    """Whether some of it is not on disk."""
    sources = [urls] if isinstance(urls, str) else urls if isinstance(urls, Sequence) else []
    return any(isinstance(url, str) and _is_remote(url) for url in sources)


def _is_remote(url: str) -> bool:
    if "://" in url:
        return not url.startswith("file://")
    if not url.isidentifier() or os.path.exists(url):
        return False
    from penstock.read.hub import SHORT_NAMES

    return url in SHORT_NAMES


def _load(spec: Any, **how: Any) -> Tokenizer:
    # Imported here: while Arrow and the tokenizers are, the files are being listed.
    from penstock.encode.tokenizer import load_tokenizer

    return load_tokenizer(spec, **how)


class TextDataset:
    """Text in Parquet, JSONL or plain files, to be streamed as packed rows of ids.

    `urls` is a file, a folder, a glob, or a list of these: on disk, on the Hub (`hf://datasets/…`), in a
    bucket (`s3://`, `gs://`, `az://`) or on a web server (`https://`, files only).
    """

    packed = True
    """It gives packed rows of ids."""

    def __init__(
        self,
        urls: Path | Sequence[Path],
        *,
        tokenizer: Any,
        seq_len: int,
        text_field: str = "text",
        packing: Packing = "concat",
        split: Literal["train", "val"] | None = None,
        val_fraction: float = 0.005,
        split_seed: int = 0,
        format: Format | None = None,
        separator: str | bytes | None = None,
        eos: str | int | None = AUTO,
        bos: str | int | None = None,
        engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken"] = "auto",
        positions: bool = False,
        chunk_bytes: int = 4 * MiB,
        shuffle_chunks: int = 16,
        shuffle_bytes: int = 256 * MiB,
        on_bad_record: OnBadRecord = "raise",
        quarantine: Path | None = None,
        max_doc_bytes: int = 256 * MiB,
        max_ratio: float = 1000.0,
        skip: Iterable[Any] = (),
        doc_batch: int | None = None,
        tokenizer_cache_bytes: int = WORD_CACHE_BYTES,
        config: str | None = None,
        remote: Remote | dict[str, Any] | None = None,
        cache: bool | Literal["auto"] = "auto",
        cache_bytes: int = 50 * GiB,
        share_listing: bool = False,
    ) -> None:
        """Describe a dataset.

        tokenizer: "byte"; a tokenizer.json or a folder with one; a .tiktoken file; a Hub name; or
            an object of tokenizers, transformers or tiktoken.
        packing: "concat" loses no token; "bos" begins each row with a document and crops what does
            not fit; "best_fit" cuts only documents longer than a row, and pads.
        split: "train" or "val", told apart by a hash of each document's address. Reading "val"
            reads all files, and tokenizes only its own share.
        separator: what stands between the documents of a plain-text file; None: a file is one.
        eos, bos: the special token after and before each document, by name or id; None for none.
        positions: give each batch `positions` and `cu_seqlens`, for attention within documents.
        chunk_bytes: bytes of JSONL or plain text read at once. More mean more memory for each
            worker, fewer a higher share of overhead.
        shuffle_chunks, shuffle_bytes: the size of a full shuffle window. A larger one mixes better
            and takes memory: the tokens of two windows are held for each lane.
        on_bad_record: what to do with a record that cannot be used. "quarantine" also writes its
            address to the JSONL file `quarantine`.
        max_doc_bytes, max_ratio: the longest text, and how far a file may expand.
        skip: documents to leave out, as spans or addresses from `batch.provenance()`.
        doc_batch: documents tokenized at once; the whole chunk where None. Never changes the stream.
        tokenizer_cache_bytes: memory the tokenizer's cache of words may take before it starts anew.
        config: which of the configurations of a Hub dataset's card, by name.
        remote: deadlines, retries and requests in flight, where data comes over a network.
        cache: keep token chunks on disk, so that the next epoch and the next run need neither network nor
            tokenizer. "auto": for remote data.
        cache_bytes: disk that the token cache may use. When full, what will be needed last is dropped first.
        share_listing: have rank 0 list the files for all, through torch.distributed. All ranks must then
            create the dataset, and in the same order as others; files on disk must be there for each of them.
        """
        one_of("packing", packing, get_args(Packing))
        one_of("on_bad_record", on_bad_record, get_args(OnBadRecord))
        one_of("split", split, (None, "train", "val"))
        one_of("format", format, (None, *get_args(Format)))
        one_of("engine", engine, ("auto", "gigatoken", "tokenizers", "tiktoken"))
        if not isinstance(val_fraction, float | int) or not 0.0 < val_fraction < 1.0:
            raise ConfigError(f"val_fraction={val_fraction!r}: needs a number between 0 and 1")
        if not isinstance(max_ratio, float | int) or not max_ratio >= 1.0:
            raise ConfigError(f"max_ratio={max_ratio!r}: needs a number, at least 1")
        if not isinstance(text_field, str):
            raise ConfigError(f"text_field={text_field!r}: needs the name of a column or field")
        if not isinstance(separator, str | bytes | None) or separator in ("", b""):
            raise ConfigError(
                f"separator={separator!r}: needs text, or None to make each file a document"
            )
        if not isinstance(quarantine, str | os.PathLike | None):
            raise ConfigError(f"quarantine={quarantine!r}: needs a path")
        if (on_bad_record == "quarantine") != (quarantine is not None):
            raise ConfigError("on_bad_record='quarantine' and quarantine='file.jsonl' go together")
        for name, token in (("eos", eos), ("bos", bos)):
            if not isinstance(token, str | int | None) or isinstance(token, bool):
                raise ConfigError(f"{name}={token!r}: needs a special token's name or id, or None")
        if isinstance(separator, str):
            separator = separator.encode()
        self.seq_len = whole_number("seq_len", seq_len, 1)
        self.packing: Packing = packing
        self.positions = bool(positions)
        self.shuffle_chunks = whole_number("shuffle_chunks", shuffle_chunks, 1)
        self.shuffle_bytes = whole_number("shuffle_bytes", shuffle_bytes, 1)
        self.doc_batch = None if doc_batch is None else whole_number("doc_batch", doc_batch, 1)
        self.quarantine = None if quarantine is None else os.fspath(quarantine)
        if not isinstance(config, str | None):
            raise ConfigError(
                f"config={config!r}: needs the name of a configuration of the dataset's card"
            )
        if not isinstance(cache, bool) and cache != "auto":  # 1 is not True: it would keep nothing
            raise ConfigError(
                f"cache={cache!r}: needs True, False or 'auto'. PENSTOCK_CACHE says where it is."
            )
        if not isinstance(share_listing, bool):
            raise ConfigError(f"share_listing={share_listing!r}: needs True or False")
        words = whole_number("tokenizer_cache_bytes", tokenizer_cache_bytes, MiB)
        load = partial(_load, tokenizer, eos=eos, bos=bos, engine=engine, cache_bytes=words)
        begun = time.perf_counter()
        self.outside: Outside | None = None
        """What it needs of the network and keeps of it; None where it needs and keeps nothing."""
        self.files: tuple[FileRef, ...]
        if any_remote(urls):
            from penstock.sources.far import Listing, far_away

            listing = Listing(urls, format, separator is None, config, share_listing)
            self.files, self.tokenizer, self.outside = far_away(listing, Remote.of(remote), load)
        else:
            if config is not None:
                raise ConfigError(
                    f"config={config!r}: is for datasets on the Hub; these files are on disk"
                )
            here = partial(list_files, urls, format=format, whole=separator is None)
            if share_listing:
                from penstock.sources.far import shared

                here = partial(shared, here)
            self.files = here()
            self.tokenizer = load()
        self.listed = (begun, time.perf_counter())
        """When files were listed and the tokenizer loaded: for the ledger of a start."""
        self.listing_told = False
        if cache is True or (cache == "auto" and self.outside is not None):
            from penstock.sources.network import Outside

            self.outside = self.outside or Outside(limits=Remote.of(remote), folder=cache_dir())
            self.outside = replace(
                self.outside, cache_bytes=whole_number("cache_bytes", cache_bytes, 0)
            )
        self.read = ReadSettings(
            text_field=text_field,
            separator=separator,
            chunk_bytes=whole_number("chunk_bytes", chunk_bytes, KiB),
            split=split,
            val_fraction=val_fraction,
            split_seed=whole_number("split_seed", split_seed, 0),
            on_bad_record=on_bad_record,
            max_doc_bytes=whole_number("max_doc_bytes", max_doc_bytes, 1),
            max_ratio=max_ratio,
            skip=self._addresses(skip),
        )

    @staticmethod
    def from_iterable(source: Any, *, tokenizer: Any, seq_len: int, **more: Any) -> TextStream:
        """Text that is no file: an iterable of strings, of mappings with a text field, or of arrays of ids.

        source: a function that gives the iterable anew for each epoch, a collection, a `datasets`
            stream, or an iterator (for a single epoch). If it has `state_dict` and `load_state_dict`,
            a resume uses them; if not, a resume reads it again up to where it was, and says so.
        tokenizer: as for files; None where the documents are ids already.
        more: text_field, packing, eos, bos, engine, positions, shuffle_chunks, doc_batch and
            tokenizer_cache_bytes as for files; name, what to call it in messages and states;
            chunk_docs and chunk_bytes, how much is tokenized at once.
        """
        from penstock.sources.text_stream import TextStream

        return TextStream(source, tokenizer=tokenizer, seq_len=seq_len, **more)

    def _addresses(self, skip: Iterable[Any]) -> frozenset[Address]:
        names = {member.name for file in self.files for member in file.members}
        names |= {file.name for file in self.files if not file.members}
        from penstock.state import address

        try:
            addresses = frozenset(address(entry) for entry in skip)
        except (StateFormat, TypeError) as error:
            raise ConfigError(f"skip: {error}") from error
        for entry in addresses:
            if entry.file not in names:
                raise ConfigError(
                    f"skip names {entry.file!r}, which is none of the {len(names)} files listed"
                )
        return addresses

    def __repr__(self) -> str:
        size = sum(file.size for file in self.files)
        return f"TextDataset({len(self.files)} files, {size} bytes, {self.tokenizer.vocabulary.name}, seq_len={self.seq_len})"

    def fetches(self) -> int:
        """Requests to have in flight; 0 where everything is on disk."""
        if self.outside is None or not any(file.remote for file in self.files):
            return 0
        return self.outside.limits.fetches

    def pack(self) -> PackSettings:
        """How the documents become rows."""
        from penstock.sources.text import PackSettings

        return PackSettings(
            seq_len=self.seq_len,
            packing=self.packing,
            window_chunks=self.shuffle_chunks,
            window_bytes=self.shuffle_bytes,
            extras=self.positions,
            chunk_bytes=self.read.chunk_bytes,
            pad_id=self.tokenizer.pad_id,
            dtype=self.tokenizer.dtype,
            expansion=self.tokenizer.expansion,
        )

    def data_id(self) -> dict[str, Any]:
        """Identifies the data in a state."""
        return {
            "files": fingerprint(self.files),
            "count": sum(len(file.members) or 1 for file in self.files),
            "bytes": sum(file.size for file in self.files),
        }

    def tokenizer_id(self) -> dict[str, Any]:
        """Identifies the ids in a state."""
        name = os.path.basename(self.tokenizer.vocabulary.name)
        return {"name": name, "fingerprint": self.tokenizer.fingerprint}

    def settings_id(self) -> dict[str, Any]:
        """The settings that the stream depends on."""
        read = self.read
        settings: dict[str, Any] = {
            "seq_len": self.seq_len,
            "packing": self.packing,
            "text_field": read.text_field,
            "chunk_bytes": read.chunk_bytes,
            "shuffle_chunks": self.shuffle_chunks,
            "shuffle_bytes": self.shuffle_bytes,
            "max_doc_bytes": read.max_doc_bytes,
            "max_ratio": read.max_ratio,
        }
        if read.separator is not None:
            settings["separator"] = read.separator.decode("utf-8", "backslashreplace")
        if read.split is not None:
            settings |= {
                "split": read.split,
                "val_fraction": read.val_fraction,
                "split_seed": read.split_seed,
            }
        return settings
