"""`python tools/scaling …`: cli.py, from a checkout, without anything installed but the dependencies."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")]

from scaling.cli import main  # noqa: E402 - from the folders named above

if __name__ == "__main__":
    main()
