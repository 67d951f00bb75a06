"""The sabotages of e2e/ break what they claim to break: a rename must not turn one of them into nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SABOTAGE = Path(__file__).parents[2] / "e2e" / "sabotage"
MODULES = sorted((*SABOTAGE.glob("worker/*.py"), *SABOTAGE.glob("operator/*.py")))
GREEDY = """
import runpy, sys
from types import SimpleNamespace
runpy.run_path(sys.argv[1])
from ballast_policy.host import Host
from ballast_policy.snapshot import PolicyConfig
host = Host(PolicyConfig(slots=8, num_blocks=100, offline_share=0.25))
snapshot = host.snapshot(SimpleNamespace(num_free=100, hint=lambda request: None), 0.0)
print(snapshot.reservation.slots, snapshot.reservation.blocks, snapshot.reservation.chunk, host.reservation.slots)
"""


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_sabotage_replaces_only_what_is_there(module: Path) -> None:
    lines = ast.parse(module.read_text()).body
    names: dict[str, object] = {}
    imports = [line for line in lines if isinstance(line, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), str(module), "exec"), names)
    replaced = [
        target
        for line in lines
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
    ]

    assert replaced
    for target in replaced:
        assert hasattr(names[target.value.id], target.attr), ast.unparse(target)


def test_the_greedy_plan_reserves_nothing_and_the_worker_reports_its_reservation() -> None:
    module = str(SABOTAGE / "worker" / "greedy.py")
    done = subprocess.run([sys.executable, "-c", GREEDY, module], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["0", "0", "0", "2"]
