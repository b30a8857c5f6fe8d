"""`penstock doctor`: check that this machine can feed a run, and find the bottleneck."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path

from penstock.cli.command import hidden_log, print_json
from penstock.errors import PenstockError
from penstock.options import option, options
from penstock.tools.data_choice import DataOptions, choose_data


@options
class DoctorOptions:
    """Options of `penstock doctor`.

    target: Settings of a run (run.toml), or hf://…, s3://…, a path, stdlib.
    seconds: Seconds to run after the first batch.
    tokens_per_second: The rate that the trainer needs.
    trace: Also write a trace for Perfetto to this file.
    json: Print JSON.
    """

    target: str
    _: KW_ONLY
    seconds: float = option(default=5.0, minimum=0.001, below=1e7)
    tokens_per_second: float | None = option(default=None, minimum=1e-9)
    trace: Path | None = None
    json: bool = False


def doctor(given: DoctorOptions, data: DataOptions) -> int:
    """Run the loader for a few seconds: is it fast enough?

    Exit code 0: a trainer at N tokens per second would wait for less than 5 % of its time, or no
    rate was given. 1: it would wait longer. 2: the data cannot be read, or an argument is
    invalid. The token cache is neither read nor written.
    """
    from penstock.tools.doctor import diagnose

    try:
        with hidden_log():
            choice = choose_data(data, given.target, token_cache=False)
            found = diagnose(
                choice.make(), seconds=given.seconds, tokens_per_second=given.tokens_per_second,
                trace=given.trace, **choice.arguments,
            )  # fmt: skip
    except (PenstockError, OSError) as error:
        if given.json:
            print_json({"error": f"{type(error).__name__}: {error}", "exit_code": 2})
        raise
    print_json(found.as_dict()) if given.json else print(found.as_text())
    return found.exit_code
