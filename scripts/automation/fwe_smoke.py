"""Does a run get its first batch? `penstock smoke` under the name that runbooks know.

python scripts/automation/fwe_smoke.py --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("penstock") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from penstock.cli.main import app

if __name__ == "__main__":
    app(["smoke", *sys.argv[1:]])
