"""Micro-benchmarks: one part of Fuelrail against what it stands in for, as ratios taken in one run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # `support` has servers that some of them read from
