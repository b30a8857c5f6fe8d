"""A command line in this process, as `penstock …` runs it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest.mock import patch

from penstock.cli.main import app


class Done(NamedTuple):
    """What a command left: its exit code, stdout and stderr."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Everything that it printed."""
        return self.stdout + self.stderr


def run(*args: Any, **environment: str) -> Done:
    """Run a command line to its end."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), patch.dict("os.environ", environment):
            app([str(arg) for arg in args])
    except SystemExit as end:
        return Done(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("a command ends with an exit code")
