"""Pre-stage text on local disk: `penstock bootstrap` under the name that runbooks know.

python scripts/automation/fwe_bootstrap.py --out /data/fwe_bootstrap.jsonl --bytes 5368709120
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("penstock") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from penstock.cli.main import app

if __name__ == "__main__":
    app(["bootstrap", *sys.argv[1:]])
