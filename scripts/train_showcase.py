"""Train on one process, or with DDP under torchrun: `penstock train` under the name that runbooks know.

python scripts/train_showcase.py --dataset fineweb_edu --ddp 0 --steps 50
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("penstock") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from penstock.cli.train import main

if __name__ == "__main__":
    main()
