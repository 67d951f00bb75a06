"""Run every benchmark in turn and print what it prints; `--quick` is passed on.

python benchmarks/all.py            all of them, a quarter of an hour on two cores
python benchmarks/all.py --quick    shorter runs, wider spreads
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LEFT_OUT = {"all.py", "size.py", "demo_pooled.py"}
"""Not benchmarks, or longer than all others together."""


def main() -> int:
    """Run them; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    quick = ["--quick"] if parser.parse_args().quick else []
    failed = []
    for script in sorted(path for path in HERE.glob("*.py") if path.name not in LEFT_OUT):
        print(f"\n=== {script.name}", flush=True)
        if subprocess.run([sys.executable, str(script), *quick], check=False).returncode:
            failed.append(script.name)
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
