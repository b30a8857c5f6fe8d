"""TextDataset: text files, and how to tokenize and pack them.

The constructor lists the files and loads the tokenizer, concurrently if the files are remote. It
reads no data, and leaves no thread running. Loaders may share a dataset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config import cache_dir
from penstock.errors import ConfigError
from penstock.options import RemoteOptions, TextOptions, accepts, from_habit, options_of
from penstock.read import ReadSettings
from penstock.read.listing import fingerprint, is_remote, list_files
from penstock.types import Address

if TYPE_CHECKING:
    from penstock.encode.tokenizer import Tokenizer
    from penstock.sources.base import Source
    from penstock.sources.remote_dataset import RemoteConfig
    from penstock.sources.text_iterable import TextIterable

Path = str | os.PathLike[str]


def any_remote(urls: Any) -> bool:
    """Return True if any of the data is remote."""
    sources = [urls] if isinstance(urls, str) else urls if isinstance(urls, Sequence) else []
    return any(isinstance(url, str) and is_remote(url) for url in sources)


class TextDataset:
    """Text in Parquet, JSONL or plain files, streamed as packed rows of ids."""

    @accepts(TextOptions)
    def __init__(self, urls: Path | Sequence[Path], **kwargs: Any) -> None:
        """Describe a dataset.

        urls: a file, a folder, a glob, or a list of these: on disk, on the Hub (hf://datasets/…), in a
            bucket (s3://, gs://, az://) or on a web server (https://, files only).
        """
        self.options = options = TextOptions(**from_habit(kwargs, options_of(TextOptions)))
        self.remote = remote = RemoteOptions.of(options.remote)
        self.seq_len = options.seq_len
        separator = options.separator
        separator = separator.encode() if isinstance(separator, str) else separator or None

        def load() -> Tokenizer:
            # Imported here, because a remote listing overlaps the import of Arrow and tokenizers.
            from penstock.encode.tokenizer import load_tokenizer

            return load_tokenizer(options.tokenizer, eos=options.eos, bos=options.bos)

        began = time.perf_counter()
        self.remote_config: RemoteConfig | None = None
        """Network and cache; None for uncached local files."""
        listing = partial(list_files, urls, format=options.format, whole=separator is None)
        if any_remote(urls):
            from penstock.sources.remote_dataset import list_remote

            self.files, self.tokenizer, self.remote_config = list_remote(
                lambda session: listing(remote=session), remote, load, urls=urls
            )
        else:
            if remote.config is not None:
                raise ConfigError(f"config={remote.config!r} is for Hub datasets, not local files")
            if remote.share_listing:
                from penstock.sources.remote_dataset import list_on_rank_0

                self.files = list_on_rank_0(listing)
            else:
                self.files = listing()
            self.tokenizer = load()
        self.listings = [(began, time.perf_counter())]
        """The start and end of listing and loading the tokenizer, until a loader reports them."""
        if options.cache is True or (options.cache == "auto" and self.remote_config is not None):
            from penstock.sources.remote_dataset import RemoteConfig

            config = self.remote_config or RemoteConfig(limits=remote, folder=cache_dir())
            self.remote_config = replace(config, cache_bytes=remote.cache_bytes)
        on_bad_record, _, self.quarantine = options.on_bad_record.partition(":")
        split, _, fraction = (options.split or "").partition(":")
        self.read = ReadSettings(
            text_field=options.text_field,
            separator=separator,
            chunk_bytes=options.chunk_bytes,
            split=split or None,
            val_fraction=float(fraction or 0.005),
            on_bad_record=on_bad_record,
            skip=self._addresses(options.skip),
            transform=options.transform,
        )
        if options.filter is not None:
            from penstock.read.validation import parse_filter

            self.read = replace(self.read, filter=parse_filter(options.filter))

    @staticmethod
    def from_iterable(source: Any, *, tokenizer: Any, seq_len: int, **more: Any) -> TextIterable:
        """Return a dataset of an iterable of strings, of mappings with a text field, or of ids.

        source: a function that returns a new iterable for each epoch, a collection, a `datasets`
            stream, or an iterator (one epoch only). A resume uses its `state_dict` and
            `load_state_dict`; without them it reads the iterable up to the position, and warns.
        tokenizer: as for files; None if the documents are ids.
        more: text_field, packing, eos, bos, positions and shuffle_chunks as for files; name, for
            messages and states; chunk_docs and chunk_bytes, the size of a chunk.
        """
        from penstock.sources.text_iterable import TextIterable

        return TextIterable(source, tokenizer=tokenizer, seq_len=seq_len, **more)

    def _addresses(self, addresses: Iterable[Any]) -> frozenset[Address]:
        files = {each.name: file for file in self.files for each in file.members or [file]}
        for entry in addresses:
            file = files.get(entry.file)
            if file is None:
                raise ConfigError(f"skip: {entry.file!r} is not one of the {len(files)} files")
            if (entry.group is None) == (file.format == "parquet"):
                raise ConfigError(f"skip: {list(entry)}: a row group is for Parquet files only")
        return frozenset(addresses)

    def __repr__(self) -> str:
        about, name = self.data_id(), self.tokenizer.vocabulary.name
        files = f"{about['count']} file" + "s" * (about["count"] != 1)
        return f"TextDataset({files}, {about['bytes']} bytes, {name}, seq_len={self.seq_len})"

    def as_source(self) -> Source:
        """Return the source of packed rows that a loader reads."""
        from penstock.sources.text_files import TextSource

        return TextSource(self)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer, special tokens included."""
        return self.tokenizer.vocab_size

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a row of ids, with special tokens by name."""
        return self.tokenizer.decode(ids)

    def data_id(self) -> dict[str, Any]:
        """Return the fields of a state that identify the data."""
        return {
            "files": fingerprint(self.files),
            "count": sum(len(file.members) or 1 for file in self.files),
            "bytes": sum(file.size for file in self.files),
        }

    def tokenizer_id(self) -> dict[str, Any]:
        """Return the fields of a state that identify the tokenizer."""
        name = os.path.basename(self.tokenizer.vocabulary.name)
        return {"name": name, "fingerprint": self.tokenizer.fingerprint}
