"""What docs/how-to/install-on-kubernetes.md states about other autoscalers: objects and commands."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "install-on-kubernetes.md"


def documented(key: str, value: Any = None) -> Any:
    """Return the YAML block that has this key, with this value if one is given."""
    blocks = [
        yaml.safe_load(each) for each in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ]
    (found,) = [each for each in blocks if key in each and value in (None, each[key])]
    return found


def hand_over(words: str) -> str:
    """Return the command of the section "Hand the number over" that contains these words."""
    section = PAGE.read_text().partition("### Hand the number over")[2].partition("\n## ")[0]
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE)
    (found,) = [textwrap.dedent(each) for each in blocks if words in each]
    return found
