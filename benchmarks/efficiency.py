"""Utilisation and throughput of coupled, partial and decoupled scheduling: `dart bench efficiency`.

    python benchmarks/efficiency.py [--seconds 60] [--repeats 3] [--faults both] [--arms all]

The arguments are those of `dart bench efficiency configs/efficiency.toml`; the baseline is the
coupled batch-wise loop in the same code, the physical limit the least of what environments, rollout
workers and trainer can do (dart_cli/bench/bound.py). The last line is one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dart_cli.cli.main import main

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "efficiency.toml"

if __name__ == "__main__":
    main(["bench", "efficiency", str(CONFIG), *sys.argv[1:]])
