"""Change a package in many small ways, one at a time, and count the changes that its tests notice.

    make mutation ARGS='ballast_queue --sample 500'    # 500 mutants, drawn at random
    make mutation ARGS='ballast_queue keys job'        # every mutant of two modules
    make mutation ARGS='ballast_queue --again'         # the survivors of the last run, against changed tests

The tool is mutmut. `make mutation` installs it into a separate folder. mutmut changes the bodies of functions. It
leaves out decorated functions (except class methods and static methods), the module level, and `ballast.lua`.

The tests that call the changed function run against each mutant, the quickest first, until one fails. The diffs of the
survivors are in `.mutation/PACKAGE/survivors.diff`. The exit code is 0, because a survivor is not an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

ROOT = Path(__file__).parent.parent


TESTS = {"ballast_openai": "tests/openai", "ballast_policy": "tests/policy", "ballast_queue": "tests/queue"}
KILLED, SURVIVED, TIMED_OUT, UNCOVERED = "killed", "survived", "timed out", "no test"
_BY_EXIT = {0: SURVIVED, 5: UNCOVERED, 33: UNCOVERED, 1: KILLED, 3: KILLED}
"""mutmut's exit codes. Any other code is a signal: the mutant used up its time or the memory."""
_SETTINGS = """
[tool.mutmut]
source_paths = ["src/{package}"]
also_copy = ["conftest.py", "docs"]
pytest_add_cli_args_test_selection = ["{tests}"]
timeout_multiplier = 4.0
timeout_constant = 5.0
"""
_CONFTEST = """
import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings

STATS = Path("mutmut-stats.json")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    settings.register_profile("mutation", settings.default, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutation")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if STATS.exists():
        seconds = json.loads(STATS.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0))
"""
"""mutmut names the tests of a mutant in any order. This runs the quickest first, so that most mutants cost little.

A failing example is not made smaller, because it is not shown.
"""


def stage(package: str, tests: str, place: Path) -> None:
    """Copy the package and its tests to a folder in which mutmut finds both under the names that the tests import."""
    shutil.rmtree(place, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "worker" / package, place / "src" / package, ignore=ignored)
    for folder in (tests, "tests/support", "docs"):
        shutil.copytree(ROOT / folder, place / folder, ignore=ignored)
    shutil.copy(ROOT / "tests" / "conftest.py", place / "tests")
    (place / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + _SETTINGS.format(package=package, tests=tests)
    (place / "pyproject.toml").write_text(settings, encoding="utf-8")


def generate(place: Path) -> list[str]:
    """Write the mutants; return their names."""
    program = (
        "import os; from mutmut import __main__ as m; os.makedirs('mutants', exist_ok=True); "
        "m.copy_src_dir(); m.copy_also_copy_files(); m.create_mutants(1)"
    )
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=place, env=environment(place), stdout=subprocess.DEVNULL, check=True)
    return list(exit_codes(place))


def run(place: Path, names: Sequence[str]) -> dict[str, str]:
    """Run the tests against mutants; return the outcome of each."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *names]
    with (place / "mutmut.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=place, env=environment(place), stdout=log, stderr=log, start_new_session=True
        )
        try:
            if process.wait():
                raise SystemExit(f"mutmut failed: see {place / 'mutmut.log'}")
        finally:
            # A mutant that is killed leaves the servers that its tests started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = exit_codes(place)
    return {name: _BY_EXIT.get(found[name] if found[name] is not None else 33, TIMED_OUT) for name in names}


def environment(place: Path) -> dict[str, str]:
    """Return an environment in which programs that the tests start import the mutants, too."""
    paths = [place / "mutants" / "src", ROOT / "worker", ROOT / "crds", ROOT / "operator"]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), *given])}


def exit_codes(place: Path) -> dict[str, int | None]:
    """Return mutmut's exit code of every mutant."""
    found: dict[str, int | None] = {}
    for path in sorted((place / "mutants" / "src").rglob("*.meta")):
        found |= json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return found


def diffs(place: Path, names: Iterable[str]) -> str:
    """Return the diffs of mutants."""
    program = (
        "import sys; from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant as diff\n"
        "for name in sys.stdin.read().split(): print('#', name); print(diff(name, path=find_mutant(name).path))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=place, env=environment(place), input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout


def report(outcomes: dict[str, str], total: int) -> None:
    """Print the outcomes by module."""
    by_module: dict[str, Counter[str]] = {}
    for name, outcome in outcomes.items():
        by_module.setdefault(name.partition(".x")[0], Counter())[outcome] += 1
    columns = (KILLED, TIMED_OUT, SURVIVED, UNCOVERED)
    print(f"{'module':32}{'mutants':>9}" + "".join(f"{one:>11}" for one in columns))
    for module, counts in sorted(by_module.items()):
        print(f"{module:32}{counts.total():>9}" + "".join(f"{counts[one]:>11}" for one in columns))
    counts = Counter(outcomes.values())
    print(f"{f'tried, of {total}':32}{counts.total():>9}" + "".join(f"{counts[one]:>11}" for one in columns))


def main() -> None:
    """Draw mutants, try them, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=sorted(TESTS))
    parser.add_argument("modules", nargs="*", help="modules of the package; all of them by default")
    parser.add_argument("--again", action="store_true", help="try only the survivors of the last run")
    parser.add_argument("--sample", type=int, metavar="N", help="number of mutants to try; all of them by default")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample")
    options = parser.parse_args()
    package, tests = options.package, TESTS[options.package]
    place = ROOT / ".mutation" / package
    survivors = place / "survivors.diff"
    alive = re.findall(r"^# (\S+)$", survivors.read_text(encoding="utf-8"), re.MULTILINE) if options.again else []
    stage(package, tests, place)
    names = generate(place)
    total = len(names)
    if options.modules:
        wanted = {f"{package}.{module}" for module in options.modules}
        names = [name for name in names if name.partition(".x")[0] in wanted]
    if options.again:
        names = sorted(set(names) & set(alive))
    if options.sample is not None:
        names = sorted(Random(options.seed).sample(names, min(options.sample, len(names))))
    if not names:
        raise SystemExit(f"{package} has no mutant to try: check the names of the modules.")
    print(f"{len(names)} of {total} mutants of {package} against {tests}; progress: {place / 'mutmut.log'}", flush=True)
    outcomes = run(place, names)
    report(outcomes, total)
    alive = [name for name, outcome in outcomes.items() if outcome in {SURVIVED, UNCOVERED}]
    survivors.write_text(diffs(place, alive), encoding="utf-8")
    print(f"Diffs of the {len(alive)} survivors: {survivors.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
