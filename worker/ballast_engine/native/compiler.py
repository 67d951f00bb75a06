"""Compile the kernels: for this processor once, in a cache for later processes, or for an instruction set."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from ballast_engine.errors import EngineError
from ballast_log import Log

log = Log(__name__)

_HERE = Path(__file__).parent
_SOURCES = ("attention.c", "decoder.c", "matmul.c", "sampling.c", "team.c")
_HEADERS = ("step.h", "team.h", "vectors.h")
# No -ffast-math: the order of sums is part of the contract of the kernels. Some platforms do not know -march=native.
FLAGS = ("-O3", "-std=gnu11", "-pthread", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi", "-Wall", "-Wextra")
"""Flags of every compilation. They are part of the hash of the sources."""
_TUNING = (("-march=native",), ("-mcpu=native",), ())
_SECONDS = 300


class NoCompiler(EngineError):
    """The kernels cannot be compiled on this machine. The message states the reason for the log."""


def compiled() -> Path:
    """Return the path of the shared library. Compile it if the cache does not have it. Safe between processes."""
    compiler = find_compiler()
    target = _cache() / f"kernels-{_key(compiler)}.so"
    if target.exists():
        return target
    started = time.perf_counter()
    _compile(compiler, _TUNING, target)
    log.info("kernels compiled", compiler=compiler, path=target, seconds=time.perf_counter() - started)
    return target


def compile_for(instruction_set: str, target: Path) -> None:
    """Compile the kernels for the processors of an instruction set, named as for `-march`."""
    _compile(find_compiler(), ((f"-march={instruction_set}",),), target)


def sources_digest() -> str:
    """Return a hash of the sources and the flags. Kernels with another hash may not fit `library.py`."""
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_HERE / name).read_bytes())
    digest.update(repr(FLAGS).encode())
    return digest.hexdigest()[:20]


def cpuinfo() -> str:
    """Return the description of the processor by Linux. It is empty on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def find_compiler() -> str:
    """Return the command of a C compiler.

    Raises:
        NoCompiler: this machine has none.
    """
    compiler = os.environ.get("CC", "").strip() or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or shutil.which(compiler.split()[0]) is None:
        raise NoCompiler(
            "this installation has no prebuilt kernels for this processor, and no C compiler found "
            f"({compiler or 'cc, gcc, clang'}): install one, for example gcc"
        )
    return compiler


def _cache() -> Path:
    chosen = os.environ.get("BALLAST_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  Path's would fail
    usual = Path(chosen or f"{home}/ballast")
    for folder in (usual, Path(tempfile.gettempdir()) / f"ballast-{os.getuid()}"):
        if folder.parts[:1] == ("~",):  # there is no home directory
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # A library is code: load it only from a folder that no other user can write to.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022:
            return folder
    raise NoCompiler(
        "no private cache folder is writable: set BALLAST_CACHE to a folder that only this user can write to"
    )


def _key(compiler: str) -> str:
    """Return a hash of everything that the result depends on: sources, flags, compiler, processor."""
    version = _run(compiler, "--version").stdout
    found = repr((sources_digest(), _TUNING, compiler, version, platform.machine(), _processor()))
    return hashlib.sha256(found.encode()).hexdigest()[:20]


def _run(compiler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*compiler.split(), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603 -- the user's own compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler} does not run ({error})") from error


def _processor() -> str:
    """Return what `-march=native` depends on: on x86 the flags, on Arm the features and part numbers."""
    lines = cpuinfo().split("\n\n", 1)[0].splitlines()
    if not lines:
        return platform.processor()
    wanted = ("flags", "model name", "cpu family", "model", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in wanted)


def _compile(compiler: str, tunings: tuple[tuple[str, ...], ...], target: Path) -> None:
    """Compile with the first tuning that the compiler knows."""
    sources = [str(_HERE / name) for name in _SOURCES]
    complaint = ""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for tuning in tunings:
            answer = _run(compiler, *FLAGS, *tuning, *sources, "-lm", "-o", str(built))
            if answer.returncode == 0:
                built.replace(target)
                return
            complaint = complaint or answer.stderr
    raise NoCompiler(f"{compiler} failed: {complaint.strip().splitlines()[0] if complaint.strip() else 'no message'}")
