"""Change a package in many small ways, one at a time, and count the changes that its tests notice.

    make mutation ARGS='ballast_queue --sample 500'      # 500 mutants, drawn at random
    make mutation ARGS='ballast_queue keys job'          # every mutant of two modules
    make mutation ARGS='ballast_policy --seconds 5'      # the quickest tests of each mutant, 5 s of them at most
    make mutation ARGS='ballast_policy --again'          # the survivors, against changed tests
    make mutation ARGS='ballast_policy --again --tests tests/policy/test_cost.py'

mutmut, which `make mutation` installs into a separate folder, writes the mutants. It changes the bodies of functions.
It leaves out decorated functions (except class methods and static methods), the module level, and `ballast.lua`.

One pytest session collects the tests and records which functions each test calls. It then forks for each mutant and
runs the tests that call the changed function, until one fails. Tests that are quick, or that detected other mutants of
the function, run first. `.mutation/PACKAGE/results.jsonl` keeps the outcomes, and an interrupted run goes on there.
`survivors.diff` beside it shows the survivors. The exit code is 0, because a survivor is not an error.
"""

from __future__ import annotations

import argparse
import builtins
import difflib
import gc
import importlib
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import accumulate, groupby
from math import inf
from pathlib import Path
from random import Random
from types import FunctionType

import pytest

ROOT = Path(__file__).parent.parent
TESTS = {"ballast_openai": "tests/openai", "ballast_policy": "tests/policy", "ballast_queue": "tests/queue"}
KILLED, TIMED_OUT, SURVIVED, UNCOVERED = OUTCOMES = ("killed", "timed out", "survived", "no test")
"""A mutant that is killed by a signal has used up its time or the memory."""
MEMORY = 16 << 30
_SETTINGS = '\n[tool.mutmut]\nsource_paths = ["src/{package}"]\n'
_GENERATE = (
    "import os; from mutmut import __main__ as m; os.makedirs('mutants', exist_ok=True); "
    "m.copy_src_dir(); m.create_mutants(1)"
)


def module_of(mutant: str) -> str:
    return mutant.partition(".x")[0]


def function_of(mutant: str) -> str:
    return mutant.rpartition("__mutmut_")[0]


def stage(package: str, tests: str, place: Path) -> None:
    """Copy the package and its tests, and write the mutants of each module that has changed."""
    for path in (ROOT / "worker" / package).rglob("*"):
        copy = place / "src" / path.relative_to(ROOT / "worker")
        if path.is_file() and not (copy.exists() and copy.read_bytes() == path.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            (place / "mutants" / copy.relative_to(place)).unlink(missing_ok=True)
    shutil.rmtree(place / "tests", ignore_errors=True)
    for folder in (tests, "tests/support", "docs"):
        shutil.copytree(ROOT / folder, place / folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "conftest.py", place / "tests")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + _SETTINGS.format(package=package)
    (place / "pyproject.toml").write_text(project, encoding="utf-8")
    subprocess.run([sys.executable, "-c", _GENERATE], cwd=place, stdout=subprocess.DEVNULL, check=True)


class Mutants:
    """The mutants of a package, which take the places of its functions in this process."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self.version: dict[str, str] = {}
        """The digest of each module. An outcome holds as long as its module is unchanged."""
        for path in sorted(folder.rglob("*.meta")):
            names = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
            self.names += names
            digest = sha256(path.with_suffix("").read_bytes()).hexdigest()[:12]
            self.version |= {module_of(name): digest for name in names}
        self.found: list[tuple[FunctionType, dict[str, FunctionType]]] = []
        # mutmut's own decorator looks for a mutant in each call. That makes the tests several times slower.
        vars(importlib.import_module("mutmut.mutation.trampoline"))["wrap_in_trampoline"] = self._wrap
        self.detours: dict[str, Callable[[], FunctionType]] = {}
        vars(builtins)["_detours"] = self.detours
        for module in self.version:
            importlib.import_module(module)
        self.by_function = {
            function_of(f"{function.__module__}.{mutants['_mutmut_orig'].__name__}"): (function, mutants)
            for function, mutants in self.found
        }

    def _wrap(self, mutants: dict[str, FunctionType], **_: object) -> Callable[[FunctionType], FunctionType]:
        def keep(function: FunctionType) -> FunctionType:
            self.found.append((function, mutants))
            return function

        return keep

    def detour(self, name: str, target: Callable[[], FunctionType]) -> None:
        """Replace the code of a function. A call first asks `target` for the function to call."""
        function, _ = self.by_function[name]
        call = f"lambda *args, **named: _detours[{name!r}]()(*args, **named)"
        if function.__code__.co_freevars:  # it calls super(), and code must have as many free variables as its function
            call = f"(lambda __class__: lambda *args, **named: (_detours[{name!r}]()(*args, **named), __class__)[0])(0)"
        self.detours[name], function.__code__ = target, eval(call).__code__  # noqa: S307

    def put(self, mutant: str) -> None:
        """Put a mutant in the place of its function, in this process and in programs that it starts."""
        os.environ["MUTANT_UNDER_TEST"] = mutant
        function, mutants = self.by_function[function_of(mutant)]
        changed = mutants[mutant.rpartition(".")[2]]
        function.__defaults__, function.__kwdefaults__ = changed.__defaults__, changed.__kwdefaults__
        if function.__code__.co_freevars == changed.__code__.co_freevars:
            function.__code__ = changed.__code__
        else:
            self.detour(function_of(mutant), lambda: getattr(changed, "__func__", changed))

    def diff(self, mutant: str) -> str:
        """Return what a mutant changes."""
        _, mutants = self.by_function[function_of(mutant)]
        both = ("_mutmut_orig", mutant.rpartition(".")[2])
        old, new = (inspect.getsource(mutants[name]).splitlines()[1:] for name in both)
        return "\n".join([f"# {mutant}", *list(difflib.unified_diff(old, new, lineterm="", n=2))[2:], "\n"])


class Results:
    """The outcome of each mutant that was tried, in a file."""

    def __init__(self, file: Path, mutants: Mutants) -> None:
        self.file, self.mutants = file, mutants
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        known = [json.loads(line) for line in lines]
        self.outcome: dict[str, str] = {
            one["mutant"]: one["outcome"]
            for one in known
            if mutants.version.get(module_of(one["mutant"])) == one["version"]
        }

    def add(self, mutant: str, outcome: str, **details: str | float) -> None:
        self.outcome[mutant] = outcome
        line = {"mutant": mutant, "version": self.mutants.version[module_of(mutant)], "outcome": outcome} | details
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def survivors(self) -> list[str]:
        return [name for name in self.mutants.names if self.outcome.get(name) in {SURVIVED, UNCOVERED}]

    def report(self, title: str, prefix: str) -> None:
        """Print how many mutants had each outcome, and write the diffs of all survivors."""
        found = Counter(outcome for name, outcome in self.outcome.items() if f"{module_of(name)}.".startswith(prefix))
        print(f"{title:34}{found.total():>9}" + "".join(f"{found[outcome]:>11}" for outcome in OUTCOMES), flush=True)
        survivors = "\n".join(map(self.mutants.diff, self.survivors()))
        self.file.with_name("survivors.diff").write_text(survivors, encoding="utf-8")


class Session:
    """A pytest plugin that runs the collected tests against each mutant, instead of once."""

    def __init__(self, mutants: Mutants, results: Results, names: Sequence[str], seconds: float) -> None:
        self.mutants, self.results, self.names, self.seconds = mutants, results, names, seconds
        self.items: list[pytest.Item] = []
        self.cost: list[float] = []
        self.tests_of: dict[str, list[int]] = defaultdict(list)
        self.ran: dict[str, Counter[int]] = defaultdict(Counter)
        self.detected: dict[str, Counter[int]] = defaultdict(Counter)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # noqa: PLC0415  (pytest warns of a plugin that was imported before)

        # A failing example is not made smaller, because it is not shown.
        settings.register_profile("mutation", settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception):
            os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record what the tests call, and try the mutants."""
        if session.testsfailed:
            pytest.exit("Some tests cannot be collected: run them without mutants first.", 1)
        self.items = session.items
        gc.freeze()
        for test, line in enumerate(self._calls()):
            seconds, *functions = line.split()
            self.cost.append(float(seconds))
            for name in functions:
                self.tests_of[name].append(test)
        for module, names in groupby(self.names, module_of):
            for name in names:
                self._try(name)
            self.results.report(module, f"{module}.")
        return True

    def _calls(self) -> list[str]:
        """Return what each test costs and calls. It is recorded again if the package or a test has changed."""
        texts = [path.read_text(encoding="utf-8") for path in sorted(Path().glob("[st]*/**/*.py"))]
        version = sha256("".join([*texts, *(item.nodeid for item in self.items)]).encode()).hexdigest()
        kept = Path("calls")
        lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
        if lines[:1] != [version]:
            status, found = self._fork(self._record)
            if status:
                pytest.exit(f"{self.items[len(found)].nodeid} fails without a mutant.", 1)
            lines = [version, *found]
            kept.write_text("\n".join(lines), encoding="utf-8")
        return lines[1:]

    def _record(self, tell: Callable[[str], object]) -> None:
        """Run each test without a mutant, and tell what it costs and calls."""
        codes = {name: function.__code__ for name, (function, _) in self.mutants.by_function.items()}
        called: set[str] = set()

        def note(name: str) -> FunctionType:
            called.add(name)
            function, _ = self.mutants.by_function[name]
            function.__code__ = codes[name]  # the first call is enough, and other calls take their usual time
            return function

        for item, following in zip(self.items, [*self.items[1:], None], strict=True):
            called.clear()
            for name in codes:
                self.mutants.detour(name, partial(note, name))
            began = time.process_time()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            tell(" ".join([str(time.process_time() - began), *sorted(called)]))

    def _try(self, mutant: str) -> None:
        """Run the tests of a mutant until one fails."""
        ran, detected = self.ran[function_of(mutant)], self.detected[function_of(mutant)]
        tests = self.tests_of[function_of(mutant)]
        order = sorted(tests, key=lambda test: self.cost[test] * (ran[test] + 1) / (detected[test] + 0.1))
        sums = accumulate(self.cost[test] for test in order)
        chosen = [test for test, total in zip(order, sums, strict=True) if total <= self.seconds]
        if not chosen and mutant in self.results.outcome:
            return

        def run(tell: Callable[[str], object]) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            self.mutants.put(mutant)
            for test, following in zip(chosen, [*chosen[1:], None], strict=True):
                tell(str(test))
                signal.setitimer(signal.ITIMER_PROF, 2 + 2 * self.cost[test])
                signal.setitimer(signal.ITIMER_REAL, 30 + 20 * self.cost[test])
                item, after = self.items[test], None if following is None else self.items[following]
                item.ihook.pytest_runtest_protocol(item=item, nextitem=after)

        began = time.monotonic()
        status, lines = self._fork(run) if chosen else (0, [])
        spent = round(time.monotonic() - began, 2)
        ran.update(map(int, lines))
        if status:
            last = int(lines[-1])
            detected[last] += 1
            outcome = KILLED if os.WIFEXITED(status) else TIMED_OUT
            self.results.add(mutant, outcome, seconds=spent, test=self.items[last].nodeid)
        else:
            left_out = len(order) - len(chosen)
            self.results.add(mutant, SURVIVED if order else UNCOVERED, seconds=spent, left_out=left_out)

    def _fork(self, run: Callable[[Callable[[str], object]], None]) -> tuple[int, list[str]]:
        """Run a function in a process of its own; return how it ended, and the lines that it told."""
        told = self.results.file.with_name("told")
        with told.open("w", buffering=1, encoding="utf-8") as file:
            child = os.fork()
            if not child:
                try:
                    os.setpgid(0, 0)
                    for stream in (1, 2):
                        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                    run(lambda line: file.write(line + "\n"))
                    os._exit(0)
                finally:
                    os._exit(1)
        _, status = os.waitpid(child, 0)
        # A mutant that is killed leaves the servers that its tests started.
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return status, told.read_text(encoding="utf-8").splitlines()


def main() -> None:
    """Choose mutants, try them, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=sorted(TESTS))
    parser.add_argument("modules", nargs="*", help="modules of the package; all of them by default")
    parser.add_argument("--again", action="store_true", help="try only the survivors of earlier runs")
    parser.add_argument("--sample", type=int, metavar="N", help="number of mutants to try; all of them by default")
    parser.add_argument("--seconds", type=float, default=inf, help="tests that take longer together are left out")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample")
    parser.add_argument("--tests", nargs="+", help="folders or files with tests; all of the package by default")
    options = parser.parse_args()
    place = ROOT / ".mutation" / options.package
    stage(options.package, TESTS[options.package], place)
    paths = [place / "mutants" / "src", ROOT / "worker", ROOT / "crds", ROOT / "operator"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = map(str, paths)
    os.chdir(place)
    mutants = Mutants(place / "mutants")
    results = Results(place / "results.jsonl", mutants)
    wanted = [f"{options.package}.{module}" for module in options.modules] or list(mutants.version)
    names = [name for module in wanted for name in mutants.names if module_of(name) == module]
    if options.sample is not None:
        names = sorted(Random(options.seed).sample(names, min(options.sample, len(names))))
    again = set(results.survivors())
    names = [name for name in names if (name in again if options.again else name not in results.outcome)]
    print(f"{len(names)} mutants to try. Diffs of survivors: {place / 'survivors.diff'}")
    print(f"{'module':34}{'mutants':>9}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES), flush=True)
    flags = ["-qq", "-s", "-p", "no:randomly", "-o", "timeout=0"]
    session = Session(mutants, results, names, options.seconds)
    code = pytest.main([*flags, *(options.tests or [TESTS[options.package]])], plugins=[session])
    results.report(f"tried, of {len(mutants.names)}", f"{options.package}.")
    sys.exit(code)


if __name__ == "__main__":
    main()
