"""Break the product with one fault after another, and require that tests fail each time.

`make e2e-sabotage` runs every sabotage of faults.py. `make e2e-sabotage ARGS="canned-text fencing-off"` runs the named
sabotages. Each is one run of pytest on a new release. The program writes the tests that fail into the table of
docs/what-the-tests-catch.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree as ET

from faults import FAULTS, HERE, Fault
from programs import ROOT

E2E = ROOT / "e2e"
PAGE = ROOT / "docs" / "what-the-tests-catch.md"
HEAD = "| sabotage | fault | red | green | minutes |\n|---|---|---|---|---|\n"
MINUTES = 60
UNREACHABLE = re.compile(
    "Unable to connect to the server|The connection to the server|TLS handshake timeout|etcdserver:"
    "|Error from server \\((Timeout|ServiceUnavailable|TooManyRequests)\\)"
)
"""The words of kubectl if the cluster does not answer."""


def main() -> int:
    """Run the named sabotages; return 1 if the tests missed one."""
    names = sys.argv[1:] or list(FAULTS)
    if unknown := set(names) - set(FAULTS):
        print(f"Unknown sabotage: {', '.join(sorted(unknown))}. Known: {', '.join(FAULTS)}")
        return 2
    unseen = [name for name in names if not caught(name, FAULTS[name])]
    print(f"\nNot detected: {', '.join(unseen)}" if unseen else f"\nAll {len(names)} detected.")
    return 1 if unseen else 0


def caught(name: str, fault: Fault) -> bool:
    """Apply one sabotage, run the tests, and record which of them failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-o", "timeout=1800", "-m", ""]
        words += ["-o", "cache_dir=.pytest_cache/e2e-sabotage", f"--junit-xml={report}", "-q", "--tb=line"]
        tests = ROOT / "tests" if fault.is_local else E2E
        if fault.is_local:
            (Path(folder) / "sitecustomize.py").write_text((HERE / fault.module).read_text())
            path = [folder, os.environ.get("PYTHONPATH", "")]
        else:
            words += ["-p", "plugin"]
            path = [str(E2E / part) for part in ("sabotage", "support")]
        env = {**os.environ, "BALLAST_E2E_SABOTAGE": name, "PYTHONPATH": os.pathsep.join(path)}
        print(f"\n=== {name}: {fault.what}", flush=True)
        done = subprocess.run([*words, *(tests / test for test in fault.tests)], env=env, cwd=ROOT, check=False)
        red, green, other = outcomes(report, fault.setup) if report.exists() else ([], [], [])
    # Exit code 1: tests failed. Any other code is a failure of pytest itself, which proves nothing.
    is_seen = done.returncode == 1 and bool(red)
    if other:
        print(f"Failed for another reason, so not counted: {', '.join(other)}", flush=True)
    note(name, fault, red, green, (time.monotonic() - began) / MINUTES)
    return is_seen


def outcomes(report: Path, setup: str) -> tuple[list[str], list[str], list[str]]:
    """Return the tests that detected the fault, the tests that passed, and those that failed for another reason.

    A test that cannot reach the cluster detects nothing. A fixture that fails detects the fault only if its message
    has the words in `setup`.
    """
    red: list[str] = []
    green: list[str] = []
    other: list[str] = []
    for case in ET.parse(report).getroot().iter("testcase"):
        name, failure, error = str(case.get("name")), case.find("failure"), case.find("error")
        ended = next((part for part in (failure, error) if part is not None), None)
        if ended is None:
            green.append(name)
            continue
        message = str(ended.get("message"))
        is_detected = not UNREACHABLE.search(message)
        if error is not None:
            is_detected &= bool(setup) and setup in message
        if message.startswith("failed on teardown"):
            name = "the_check_at_the_end_of_the_file"  # pytest reports it for the last test
        (red if is_detected else other).append(name)
    return red, green, other


def note(name: str, fault: Fault, red: list[str], green: list[str], minutes: float) -> None:
    """Write the row of this sabotage into the table, in place of an older one."""
    text = PAGE.read_text()
    rows = {key: row for row, key in re.findall(r"^(\| `([\w-]+)` \|.*\n)", text, re.MULTILINE)}
    said = "<br>".join(sentence(test) for test in red) or "**nothing**"
    rows[name] = f"| `{name}` | {fault.what} | {said} | {len(green)} | {minutes:.0f} |\n"
    table = HEAD + "".join(rows[key] for key in FAULTS if key in rows)
    before, _, rest = text.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    PAGE.write_text(f"{before}<!-- table -->\n{table}<!-- end -->\n{after}")


def sentence(test: str) -> str:
    """Return the name of a test as a sentence."""
    return test.removeprefix("test_").replace("_", " ")


if __name__ == "__main__":
    raise SystemExit(main())
