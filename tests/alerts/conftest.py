"""Imports of `scenarios`, and the program promtool."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

# In importlib mode pytest leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def promtool() -> str:
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    assert found, "promtool is neither on the PATH nor named by PROMTOOL: see `make alerts`"
    return found
