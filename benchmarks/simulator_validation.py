"""Print how far the simulator is from the real engine on this machine: `ballast bench validate`, with its options.

python benchmarks/simulator_validation.py --clock cpu --json validation.json
"""

from __future__ import annotations

import sys

from ballast_cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "validate", *sys.argv[1:]]))
