"""datatrove: its executor on this machine, `ParquetReader` and `DocumentTokenizer`, as its examples have it.

It writes files of ids and has no loader. A file is a task, so the source should have one for each worker. Its
tokenizer is a name or a file for `tokenizers`: it cannot be given another one.
"""

from __future__ import annotations

from datatrove.executor import LocalPipelineExecutor  # type: ignore[import-not-found, unused-ignore]
from datatrove.pipeline.readers import ParquetReader  # type: ignore[import-not-found, unused-ignore]
from datatrove.pipeline.tokens import DocumentTokenizer  # type: ignore[import-not-found, unused-ignore]

from case import EOS, Case


def prepare(case: Case) -> None:
    """Tokenize all files."""
    LocalPipelineExecutor(
        pipeline=[
            ParquetReader(case.source, glob_pattern="*.parquet"),
            DocumentTokenizer(case.prepared, case.vocabulary, eos_token=EOS),
        ],
        tasks=len(case.files()),
        workers=case.workers,
        logging_dir=f"{case.prepared}/logs",
    ).run()
