"""Train with FSDP2 under torchrun: `penstock train --fsdp` under the name that runbooks know.

torchrun --nproc_per_node=2 scripts/train_showcase_fsdp.py --dataset fineweb_edu
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("penstock") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from penstock.cli.train import main

if __name__ == "__main__":
    main("--fsdp", "1")
