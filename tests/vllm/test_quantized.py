"""Quantized weights and a quantized KV cache, through the fields `engine.quantization` and `engine.kvDtype`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_core import RealCore, prompt_of
from small_models import make_gptq
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from ballast_api.worker_config import WorkerConfig
from ballast_sim.replay.model_shape import KV_BYTES
from ballast_vllm.arguments import KV_DTYPES, serve_arguments
from ballast_vllm.serve import check, parsed

POLICY = {"ttft": 0.5, "tpot": 0.1, "offline_share": 0.25}
CHUNK = 32
"""Tokens that offline may compute in a step of the test while the cost model is not trusted."""
FIELDS = ("dtype", "quantization", "kv_cache_dtype")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def gptq_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gptq(tmp_path_factory.mktemp("models") / "gptq")


def arguments_of(model: Path, dtype: str, **engine: str) -> dict[str, Any]:
    """Return the fields of vLLM's arguments that a worker configuration decides, after all checks."""
    sections = {"model": {"uri": str(model), "dtype": dtype}, "engine": {"backend": "vllm", **engine}}
    found = parsed(serve_arguments(WorkerConfig.model_validate(sections), is_cpu=True), [])
    check(found)
    return {name: getattr(found, name) for name in FIELDS}


def answers(core: RealCore, kinds: tuple[str, str]) -> dict[str, list[int]]:
    """Return the greedy answers to some requests, one after the other, whose prompts are computed in one chunk.

    In bfloat16, other batches and chunks change the sums on processors with AMX.
    """
    for number in range(6):
        core.add(str(number), prompt_of(number)[:CHUNK], 40, kind=kinds[number % 2])
        while core.engine.has_unfinished_requests():
            core.step()
    return core.tokens


CASES = {
    "fp8 KV": ("wandering_model", "float32", {"kvDtype": "fp8"}),
    "fp8 KV in bfloat16": ("wandering_model", "bfloat16", {"kvDtype": "fp8_e5m2"}),
    "weights of 4 bits": ("gptq_model", "bfloat16", {"quantization": "gptq"}),
    "weights of 4 bits, and fp8 KV": ("gptq_model", "bfloat16", {"quantization": "gptq", "kvDtype": "fp8"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_model_answers_as_in_plain_vllm(case: str, request: pytest.FixtureRequest) -> None:
    name, dtype, engine = CASES[case]
    model = request.getfixturevalue(name)
    arguments = arguments_of(model, dtype, **engine)
    found = {}
    for policy in (None, POLICY):
        with RealCore(model, policy=policy, **arguments) as core:
            found[policy is None] = answers(core, ("online", "offline"))
            config = core.engine.vllm_config

    assert found[False] == found[True]
    assert config.cache_config.cache_dtype == engine.get("kvDtype", "auto")
    assert config.model_config.quantization == ("auto_gptq" if "quantization" in engine else None)
    distinct = [len(set(tokens)) for tokens in found[True].values()]
    assert sum(distinct) / len(distinct) > 10, "the answers repeat, and equal ones would prove nothing"


def test_fp8_kv_changes_the_answers_and_has_twice_the_blocks_of_bfloat16(wandering_model: Path) -> None:
    """Otherwise the field would have no effect."""
    found, blocks = {}, {}
    for name, engine in {"fp8": {"kvDtype": "fp8"}, "bfloat16": {}}.items():
        arguments = arguments_of(wandering_model, "bfloat16", **engine)
        with RealCore(wandering_model, policy=POLICY, kv_cache_memory_bytes=64 << 20, **arguments) as core:
            found[name] = answers(core, ("online", "offline"))
            blocks[name] = core.engine.vllm_config.cache_config.num_gpu_blocks

    assert found["fp8"] != found["bfloat16"]
    assert blocks["fp8"] == pytest.approx(2 * blocks["bfloat16"], abs=2)


@pytest.mark.parametrize("name", KV_BYTES)
def test_the_planner_counts_the_bytes_of_kv_that_vllm_allocates(name: str) -> None:
    dtype = KV_DTYPES.get(name, name)
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=128,
        dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype],
        kv_quant_mode=get_kv_quant_mode(dtype),
    )

    assert TritonAttentionBackend.customize_spec(spec).page_size_bytes == 16 * 2 * 2 * 128 * KV_BYTES[name]
