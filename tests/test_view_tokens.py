"""What a view of a run says of tokens and of the time that is left, where lines say little of them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.watch.live import RunView
from penstock.watch.view.plain import plain, progress_line

NOW = 1_790_000_000.0


def step(n: int, at: float | None = None, **fields: Any) -> dict[str, Any]:
    """A step that takes a second."""
    at = float(n) if at is None else at
    known = {
        "ts": NOW + at,
        "iso": "",
        "mono": at,
        "pid": 1,
        "rank": 0,
        "step": n,
        "msg": "progress",
    }
    return known | {"dt_step_s": 1.0} | fields


def boot(at: float, **fields: Any) -> dict[str, Any]:
    return step(0, at) | {"msg": "boot"} | fields


def viewed(*lines: dict[str, Any], **options: Any) -> RunView:
    view = RunView(**options)
    view.extend(lines)
    return view


def test_tokens_add_up_where_no_line_has_their_total() -> None:
    view = viewed(*(step(n, tokens=1000) for n in range(1, 41)), total_tokens=100_000)
    assert (view.ranks[0].tokens, view.ranks[0].tokens_per_s) == (40_000, pytest.approx(1000))
    progress = view.progress(NOW + 40)
    assert progress is not None
    assert (progress.tokens, progress.share, progress.eta_s) == (40_000, 0.4, pytest.approx(60))


def test_tokens_that_add_up_begin_with_those_from_before_a_resume() -> None:
    first = [step(n, tokens=1000) for n in range(1, 31)]
    second = [step(n, 60.0 + n, tokens=1000) for n in range(21, 41)]
    view = viewed(*first, boot(60, resumed=True), *second)
    assert view.ranks[0].tokens == 40_000


def test_tokens_that_nobody_counts_are_unknown_and_not_none() -> None:
    view = viewed(*(step(n) for n in range(1, 41)), total_tokens=1e6)
    assert (view.ranks[0].tokens, view.ranks[0].tokens_per_s) == (None, None)
    progress = view.progress(NOW + 40)
    assert progress is not None
    assert (progress.tokens, progress.share, progress.tokens_per_s, progress.eta_s) == (
        None,
        None,
        None,
        None,
    )
    assert progress_line(progress) == ""
    rows = plain(view, NOW + 40)
    assert "  - tokens/s  " in rows[0]
    assert rows[1] == f"run: {view.warmth()}"


@pytest.mark.parametrize("strange", [-5, 1e300, "many", None])
def test_what_is_no_count_of_tokens_adds_nothing(strange: Any) -> None:
    view = viewed(step(1, tokens=10), step(2, tokens=strange), step(3, tokens=10))
    assert view.ranks[0].tokens == 20


def test_steps_that_go_back_have_no_time_of_arrival() -> None:
    settings = {"max_steps": 1000}
    view = viewed(
        boot(0, settings=settings), *(step(100 - n, float(n), tokens=10) for n in range(1, 50))
    )
    progress = view.progress(NOW + 50)
    assert progress is not None
    assert progress.eta_s is None
    totals = (step(n, tokens_total=10_000.0 - 10 * n) for n in range(1, 50))
    progress = viewed(*totals, total_tokens=1e6).progress(NOW + 50)
    assert progress is not None
    assert (progress.tokens_per_s, progress.eta_s) == (None, None)
