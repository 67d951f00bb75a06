"""Draw docs/images/cluster.svg: the commands of the tutorial on a real cluster, with their output.

`make e2e-recording` installs the chart, runs the steps of the page in one shell, and draws them with their duration.
"""

from __future__ import annotations

import re
import tempfile
from io import StringIO
from pathlib import Path

from cluster import Cluster, keep_up
from programs import ROOT
from providers import chosen
from release import NAMESPACE, remove
from rich.console import Console
from rich.text import Text
from tutorial import INSTALLED, Step, run_steps

PICTURE = ROOT / "docs" / "images" / "cluster.svg"
STEPS = ("install", "check", "apply", "online", "job", "results")
WIDTH = 110
MOST = 6
"""Lines of one answer that are shown; what is left out is said."""


def main() -> None:
    """Run the steps, then draw them."""
    provider = chosen()
    was_up = provider.is_up()
    if not was_up:
        provider.up()
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(provider, Path(name))
        try:
            provider.build()
            remove(cluster)
            cluster.make_namespace(NAMESPACE)
            recorded = run_steps(cluster, *STEPS, folder=Path(name), seconds=600)
        finally:
            cluster.kubectl("delete", "infd/laptop", "-n", "default", "--ignore-not-found", check=False)
            if not was_up and not keep_up():
                provider.down()
    PICTURE.write_text(drawn(recorded))
    print(f"written: {PICTURE.relative_to(ROOT)}")


def drawn(recorded: dict[str, Step]) -> str:
    """Return a picture of a terminal with the steps."""
    console = Console(record=True, width=WIDTH, file=StringIO())
    before = 0
    for name, step in recorded.items():
        console.print(Text(f"# {name}: {int(step.at) - before} s", style="dim"))
        for line in step.commands.replace(INSTALLED, "").strip().splitlines():
            prompt = "  " if line.startswith(" ") or not line else "$ "
            console.print(Text(prompt + line, style="bold green"))
        said = step.said.strip().splitlines()
        for line in said[:MOST]:
            console.print(Text(line, overflow="ellipsis", no_wrap=True))
        if len(said) > MOST:
            console.print(Text(f"... {len(said) - MOST} lines more", style="dim"))
        console.print()
        before = int(step.at)
    svg = console.export_svg(title="Ballast on a cluster of one node")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # the picture must not load fonts


if __name__ == "__main__":
    main()
