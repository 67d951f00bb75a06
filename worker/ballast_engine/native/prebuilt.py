"""Kernels that are compiled for several instruction sets when an image is built, because an image has no compiler.

`python -m ballast_engine.native.prebuilt` compiles them into the installed package.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ballast_engine.native.compiler import compile_for, sources_digest
from ballast_engine.native.instruction_sets import INSTRUCTION_SETS, supported

FOLDER = Path(__file__).parent / "prebuilt_kernels"


def build(folder: Path, instruction_sets: Iterable[str]) -> Iterator[Path]:
    """Compile the kernels for each instruction set into `folder`.

    Raises:
        NoCompiler: there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in instruction_sets:
        path = _path(folder, name)
        compile_for(name, path)
        yield path


def find(folder: Path, machine: str, cpuinfo: str) -> Path | None:
    """Return the fastest kernels in `folder` that the processor supports, or None.

    Kernels from other sources are not found, because their file name has another digest.
    """
    paths = (_path(folder, name) for name in supported(machine, cpuinfo))
    return next((path for path in paths if path.exists()), None)


def _path(folder: Path, instruction_set: str) -> Path:
    return folder / f"kernels-{instruction_set}-{sources_digest()}.so"


if __name__ == "__main__":
    for built in build(FOLDER, INSTRUCTION_SETS[platform.machine()]):
        sys.stdout.write(f"{built}\n")
