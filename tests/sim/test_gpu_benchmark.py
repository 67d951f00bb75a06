"""The benchmark for GPUs, without a GPU: which peak it takes, and which batches it leaves out."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return importlib.import_module("benchmarks.gpu.__main__")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        *((device, None) for device in (
            "NVIDIA L40S", "NVIDIA L40", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "none",
        )),
    ],
)  # fmt: skip
def test_only_a_device_with_the_peak_of_the_table_has_it(gpu: ModuleType, device: str, name: str | None) -> None:
    if name is not None:
        assert gpu.peak_of(device).name == name
        return
    with pytest.raises(SystemExit, match="Name one with the same peak: --gpu"):
        gpu.peak_of(device)


class Engine:
    """An engine that decodes at most `fits` requests at a time."""

    def __init__(self, fits: int) -> None:
        self._fits, self._left = fits, dict[str, int]()
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, request_id: str, _: Any, params: Any) -> None:
        self._left[request_id] = params.max_tokens

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        ran = list(self._left)[: self._fits]
        self._left = {name: left - (name in ran) for name, left in self._left.items() if left > (name in ran)}
        return [SimpleNamespace(request_id=name) for name in ran]


@pytest.mark.parametrize(("fits", "fewest"), [(8, 8), (5, 3)])
def test_a_step_counts_the_requests_that_it_computes(gpu: ModuleType, fits: int, fewest: int) -> None:
    assert gpu.timed(Engine(fits), 8, num_steps=4)[1] == fewest


def test_an_mbu_above_the_peak_fails_and_leaves_the_figures(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # undone after the test
    vllm = sys.modules["vllm"]
    vllm.EngineArgs, vllm.LLMEngine = SimpleNamespace, SimpleNamespace(from_engine_args=lambda _: Engine(8))
    monkeypatch.setattr("time.perf_counter", count(step=1e-9).__next__)
    figures, said = tmp_path / "figures.json", list[str]()

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        """Run a part in this process, with the engine and the clock of the test."""
        monkeypatch.setattr(sys, "argv", command[2:])
        try:
            return SimpleNamespace(returncode=gpu.main())
        except SystemExit as error:
            said.append(str(error))
            return SimpleNamespace(returncode=1)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only=decode", "--tiny", "--gpu=l4", f"--json={figures}"])

    assert gpu.main() == 1
    assert "another peak than l4" in " ".join(said)
    assert [row["batch"] for row in json.loads(figures.read_text())["decode"]["rows"]] == [1, 8, 1, 8]
