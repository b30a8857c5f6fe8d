"""`penstock verify-resume`: check that a run on this data resumes exactly."""

from __future__ import annotations

from dataclasses import KW_ONLY

from penstock.cli.command import hidden_log
from penstock.options import option, options
from penstock.tools.data_choice import DataOptions, choose_data


@options
class VerifyOptions:
    """Options of `penstock verify-resume`.

    target: Settings of a run (run.toml), or hf://…, s3://…, a path, stdlib.
    batches: Batches to compare.
    points: Points to resume at.
    seed: Seed of the points.
    lanes: Number of lanes. Defaults to 4.
    """

    target: str
    _: KW_ONLY
    batches: int = option(default=64, minimum=2)
    points: int = option(default=5, minimum=1)
    seed: int = option(default=0, minimum=0)
    lanes: int | None = option(default=None, minimum=1)


def verify_resume(given: VerifyOptions, data: DataOptions) -> int:
    """Check that a run resumes exactly.

    Resumes at random points, twice in a row, with other numbers of workers and ranks, and compares
    every row. Exit code 0: the stream was always the same. 1: it differed; the first difference is
    shown. 2: the check could not run.
    """
    from penstock.tools.verify_resume import verify_resume as verify

    with hidden_log():
        choice = choose_data(data, given.target, batch_size=8, lanes=given.lanes)
        same = verify(
            choice.make, choice.arguments, batches=given.batches, points=given.points,
            seed=given.seed, say=print,
        )  # fmt: skip
    return 0 if same else 1
