"""Print Ballast beside the baselines on the same traffic: `ballast bench mixed`, with its options.

python benchmarks/mixed.py --load 20,40,60 --reservation 0,10 --minutes 10 --json rows.json --plot pictures
"""

from __future__ import annotations

import sys

from ballast_cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "mixed", *sys.argv[1:]]))
