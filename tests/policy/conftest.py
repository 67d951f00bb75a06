"""Lets the tests of this folder import the fake engine, the laws and the workloads beside them."""

import sys
from pathlib import Path

# In importlib mode pytest leaves sys.path alone, and these modules are shared by several test files.
sys.path.insert(0, str(Path(__file__).parent))
