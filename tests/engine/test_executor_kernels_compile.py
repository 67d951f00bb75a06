"""The kernels compile once per machine, safely between processes; without a compiler torch takes over and says so."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ballast_engine.errors import InvalidOptions
from ballast_engine.loader import load
from ballast_engine.models.packing import Packing
from ballast_engine.native import compiler, library
from ballast_engine.native.compiler import NoCompiler, compiled

COMPILE = "from ballast_engine.native.compiler import compiled; print(compiled())"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and the machine's compiler without its optimizer, which takes most of the time."""
    quick = tmp_path / "quick-cc"
    quick.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" -O0\n')
    quick.chmod(0o700)
    monkeypatch.setenv("CC", str(quick))
    monkeypatch.setenv("BALLAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_processes_that_compile_at_once_share_one_library(cache):
    command = [sys.executable, "-c", COMPILE]
    with ThreadPoolExecutor(2) as pool:
        runs = list(
            pool.map(
                lambda _: subprocess.run(command, capture_output=True, text=True, timeout=200, check=False), range(2)
            )
        )

    assert [run.returncode for run in runs] == [0, 0]
    assert {run.stdout.strip() for run in runs} == {str(path) for path in cache.iterdir()}


def test_a_second_use_compiles_nothing(cache):
    first = compiled()
    written = first.stat().st_mtime_ns

    assert compiled() == first
    assert first.stat().st_mtime_ns == written


def test_a_cache_that_others_can_write_to_is_not_trusted(cache, tmp_path, monkeypatch):
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    path = compiled()

    assert path.is_relative_to(tmp_path / "elsewhere")


def test_a_user_without_a_home_directory_has_a_cache(cache, tmp_path, monkeypatch):
    for name in ("BALLAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))

    assert compiled().is_relative_to(tmp_path / "elsewhere")


@pytest.fixture
def no_compiler(cache, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    library.kernels.cache_clear()
    yield
    monkeypatch.undo()
    library.kernels.cache_clear()


def test_without_a_compiler_the_reason_is_told(no_compiler):
    with pytest.raises(NoCompiler, match=r"no C compiler found .*/nowhere/cc.*: install one"):
        compiled()


def test_without_a_compiler_torch_takes_over_and_says_so(no_compiler, checkpoints, caplog):
    loaded = load(checkpoints("llama")[0], attention="auto", threads=1)

    assert loaded.attention == "sdpa"
    [record] = [record for record in caplog.records if "compiled kernels not used" in record.message]
    assert "no C compiler found" in record.fields["reason"]


def test_the_kernel_by_name_without_a_compiler_is_refused(no_compiler, checkpoints):
    with pytest.raises(InvalidOptions, match=r"'cpu' cannot run here: .*no C compiler found"):
        load(checkpoints("llama")[0], attention="cpu", threads=1)


def test_a_compiler_of_blanks_is_none(cache, monkeypatch):
    monkeypatch.setenv("CC", " ")

    assert compiler.find_compiler() == shutil.which("cc")


def test_kernels_that_cannot_be_loaded_are_a_reason_for_torch(cache, checkpoints, caplog):
    compiled().write_bytes(b"cut off")
    library.kernels.cache_clear()
    loaded = load(checkpoints("llama")[0], attention="auto", threads=1)
    library.kernels.cache_clear()

    assert loaded.attention == "sdpa"
    [record] = [record for record in caplog.records if "compiled kernels not used" in record.message]
    assert "cannot be loaded" in record.fields["reason"]


def test_a_compiler_that_fails_passes_on_its_message(cache, tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'out of registers' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))

    with pytest.raises(NoCompiler, match="out of registers"):
        compiled()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12, 13, 30])
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (37, 100), (256, 512), (64, 33)])
def test_packed_products_are_right_and_do_not_depend_on_the_other_rows(rows, depth, columns):
    kernels = library.kernels()
    one, two = kernels.team(1), kernels.team(2)
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, depth, generator=generator), torch.randn(columns, depth, generator=generator)
    packed = Packing(kernels.lanes).matrix(weight)
    together = kernels.multiply(x, packed, columns, team=one)
    alone = torch.cat([kernels.multiply(row[None].contiguous(), packed, columns, team=one) for row in x])

    torch.testing.assert_close(together, (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(together, alone)
    assert torch.equal(together, kernels.multiply(x, packed, columns, team=two))
