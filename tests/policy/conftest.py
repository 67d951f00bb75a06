"""Lets the tests of this folder import `replay`, `laws` and `workloads` beside them."""

import sys
from pathlib import Path

# In importlib mode pytest leaves sys.path alone, and these three are shared by several test files.
sys.path.insert(0, str(Path(__file__).parent))
