"""The sabotages of e2e/ break what they claim to break: a rename must not turn one of them into nothing."""

from __future__ import annotations

import ast
import json
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


OUTCOMES = """
import json, runpy, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
outcomes = runpy.run_path(sys.argv[1] + "/__main__.py", run_name="runner")["outcomes"]
print(json.dumps(outcomes(Path(sys.argv[3]), 'cannot create resource "events"')))
"""


@pytest.mark.parametrize(
    ("element", "found"),
    [
        pytest.param("", ([], ["test_it"], []), id="passed"),
        pytest.param('<failure message="assert 1 == 2"/>', (["test_it"], [], []), id="failed"),
        pytest.param(
            '<failure message="exit 1: kubectl get pods&#10;Unable to connect to the server: EOF"/>',
            ([], [], ["test_it"]),
            id="no cluster",
        ),
        pytest.param(
            '<error message="failed on setup with &quot;AssertionError: exit 1: buildah&quot;"/>',
            ([], [], ["test_it"]),
            id="another fixture failed",
        ),
        pytest.param(
            "<error message=\"failed on teardown with &quot;AssertionError: assert {'cannot create resource "
            "&quot;events&quot;'} == set()&quot;\"/>",
            (["the_check_at_the_end_of_the_file"], [], []),
            id="the fixture detected it",
        ),
    ],
)
def test_a_sabotage_is_detected_only_by_a_failure_that_it_causes(tmp_path: Path, element: str, found: tuple) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f'<testsuites><testsuite><testcase name="test_it">{element}</testcase></testsuite></testsuites>')
    words = [sys.executable, "-c", OUTCOMES, SABOTAGE, SABOTAGE.parent / "support", report]

    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert tuple(json.loads(done.stdout)) == found
