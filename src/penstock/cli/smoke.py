"""`penstock smoke`: check that a run with these settings gets its first batch."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from time import perf_counter

from penstock.cli.command import hidden_log
from penstock.errors import LoaderTimeout
from penstock.options import option, options
from penstock.tools.data_choice import DataOptions


@options
class SmokeOptions:
    """Options of `penstock smoke`.

    dataset: fineweb_edu, fineweb_edu_local, stdlib, synthetic, hf://…, or a path. Defaults to
        fineweb_edu.
    local_path: File for fineweb_edu_local.
    config: The run's settings, in TOML or JSON.
    timeout: Total time limit in seconds, including the listing.
    """

    _: KW_ONLY
    dataset: str | None = None
    local_path: Path | None = None
    config: Path | None = None
    timeout: float = option(default=60.0, minimum=0.001, below=1e7)


def smoke(given: SmokeOptions, data: DataOptions) -> None:
    """Fetch one batch as a run would, with workers and prefetch.

    Exit code 0: the batch arrived. 2: it did not, and one line on stderr says why. Settings come
    from the command line, then the environment, then the file.
    """
    begun = perf_counter()
    with hidden_log() as messages:
        try:
            from penstock.tools.data_choice import choose_data
            from penstock.tools.smoke import smoke as check

            choice = choose_data(
                data, given.dataset, default="fineweb_edu", batch_size=1,
                local_path=given.local_path, settings_file=given.config,
            )  # fmt: skip
            report = check(choice, given.timeout)
        except Exception as error:
            error.add_note(f"after {perf_counter() - begun:.1f} s")
            if isinstance(error, LoaderTimeout) and messages:
                error.add_note(f"last message: {messages[-1].getMessage()}")
            raise
    print(report)
