"""GPUs that share a model: memory, step times with communication, and adapters, by hand and by published figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.deployment import Deployment
from ballast_sim.planner.inputs import EngineInput, GpuInput, PlanInputs
from ballast_sim.replay.hardware import ETHERNET, GPUS, PCIE
from ballast_sim.replay.model_shape import SHAPES, Quantization
from ballast_sim.replay.step_model import BatchWork, Efficiency, Roofline
from ballast_sim.replay.traffic import Arrival

ONE = [Arrival(0, 100, 10)]
LONG = 20_000
"""Tokens whose KV takes 6.6 GB in Llama-3-70B."""
PUBLISHED = {
    ("a100", 1): {1: 234.0, 2: 171.7, 4: 143.7, 8: 136.5},
    ("a100", 8): {1: 329.5, 2: 237.6, 4: 196.4, 8: 181.9},
    ("h100", 1): {1: 153.8, 2: 128.6, 4: 107.4, 8: 97.6},
    ("h100", 8): {1: 199.2, 2: 156.2, 4: 134.6, 8: 129.1},
}
"""Milliseconds of Llama-2-7B for 128 tokens in and 20 out, by GPU and batch and then by number of GPUs, from the
performance pages of NVIDIA's NeMo framework."""


def plan(**engine: object) -> PlanInputs:
    return PlanInputs(model="llama-3-70b", gpu="h100", engine=EngineInput.model_validate(engine))


def generated(roofline: Roofline, batch: int) -> float:
    """Return the milliseconds of 128 tokens in and 20 out."""
    prefill = BatchWork.of_prompts(batch, 128)
    decodes = [BatchWork(num_decode=batch, decode_context=batch * (128 + i)) for i in range(1, 20)]
    return 1e3 * sum(roofline.predict(work) for work in (prefill, *decodes))


def test_step_times_are_near_the_published_ones_from_one_gpu_to_eight() -> None:
    errors = {
        (name, batch, count): generated(Roofline(SHAPES["llama-2-7b"], GPUS[name].group(count)), batch) / published - 1
        for (name, batch), row in PUBLISHED.items()
        for count, published in row.items()
    }

    assert sum(abs(error) for error in errors.values()) / len(errors) < 0.12
    assert max(abs(error) for error in errors.values()) < 0.32


def test_without_communication_eight_gpus_would_look_far_too_fast() -> None:
    free = Efficiency(all_reduce_microseconds=0)
    computed = generated(Roofline(SHAPES["llama-2-7b"], GPUS["a100"].group(8), efficiency=free), 1)

    assert computed < 0.55 * PUBLISHED["a100", 1][8]


def test_a_decode_of_llama_3_70b_on_eight_h100() -> None:
    roofline = Deployment.of(plan(tensor_parallel=8), ONE).model
    parameters = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 128256 * 8192
    read = 2 * parameters / (8 * 3.35e12 * 0.6)
    sent = 2 * 7 / 8 * 2 * 8192 / (450e9 * 0.75)
    together = 2 * 80 * (30e-6 + sent)
    computed = 2 * parameters / (8 * 989e12 * 0.6)
    kv = 2 * 2 * 80 * 8 * 128 * 2 / (8 * 3.35e12 * 0.6)

    assert roofline.communication(1) == pytest.approx(together)
    assert roofline.predict(BatchWork(num_decode=1, decode_context=1)) == pytest.approx(
        read + together + computed + kv + 0.002 + 3e-5
    )
    assert 1e3 * read == pytest.approx(8.6, abs=0.05)
    assert 1e3 * together == pytest.approx(4.8, abs=0.05)


def test_the_bytes_of_a_prefill_are_sent_over_the_slower_link_of_pcie() -> None:
    l4, h100 = (Roofline(SHAPES["llama-3-8b"], GPUS[name].group(2)) for name in ("l4", "h100"))
    bare = 2 * 32 * 30e-6

    assert l4.gpu.link == PCIE
    assert (l4.communication(2048) - bare) / (h100.communication(2048) - bare) == pytest.approx(450e9 / PCIE)


def test_each_gpu_sends_its_part_of_the_bytes_to_the_other_node() -> None:
    roofline = Deployment.of(plan(tensor_parallel=16, nodes=2), ONE).model
    size = 2 * 8192 * 2048
    within = 2 * 7 / 8 * size / (450e9 * 0.75)
    between = 2 * 1 / 2 * size / 8 / (50e9 * 0.75)

    assert roofline.communication(2048) == pytest.approx(2 * 80 * (60e-6 + within + between))


def test_the_time_between_nodes_follows_the_rate_of_the_network_and_the_gpus_of_a_node() -> None:
    def between(network: float, per_node: int) -> float:
        gpus = {"h100": GpuInput(network_gigabytes_per_second=network)}
        inputs = plan(tensor_parallel=2 * per_node, nodes=2).model_copy(update={"gpus": gpus})
        device = inputs.find_device()
        one = Roofline(SHAPES["llama-3-70b"], device)
        free = Roofline(SHAPES["llama-3-70b"], replace(device, network=1e30))
        return one.communication(2048) - free.communication(2048)

    assert between(5, 1) == pytest.approx(10 * between(50, 1))
    assert between(50, 1) == pytest.approx(8 * between(50, 8))


def test_nodes_have_equal_parts_of_a_replica() -> None:
    assert plan(tensor_parallel=16, nodes=2).find_device().name == "16 x h100 on 2 nodes"
    with pytest.raises(BadInput, match=r"nodes is 3, which does not divide engine\.tensorParallel, 8"):
        plan(tensor_parallel=8, nodes=3).find_device()


def test_llama_3_70b_fits_on_eight_h100_with_1_3_million_tokens_of_kv() -> None:
    deployment = Deployment.of(plan(tensor_parallel=8), ONE)
    weights = 2 * 70.55e9

    assert deployment.model.gpu.name == "8 x h100"
    assert deployment.model.gpu.dollars_per_hour == 8 * GPUS["h100"].dollars_per_hour
    assert deployment.kv_tokens == pytest.approx((0.92 * 640e9 - weights) / (2 * 80 * 8 * 128 * 2), rel=1e-3)


WEIGHTS = {
    Quantization.NONE: (2.0, 4),
    Quantization.FP8: (1.0, 2),
    Quantization.INT8: (1.0, 2),
    Quantization.INT4: (0.51953125, 1),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_smaller_weights_need_fewer_gpus(kind: Quantization) -> None:
    each, fewest = WEIGHTS[kind]
    linear = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    weights = linear * each + 2 * 2 * 128256 * 8192
    fits = []
    for count in (1, 2, 4, 8):
        inputs = plan(tensor_parallel=count).model_copy(update={"quantization": kind})
        try:
            inputs.kv_tokens(inputs.roofline("llama-3-70b"), LONG)
        except Impossible:
            continue
        fits.append(count)

    assert SHAPES["llama-3-70b"].weight_bytes(kind) == weights
    assert fits[0] == fewest


@pytest.mark.parametrize(
    ("count", "kv_dtype", "each"),
    [(8, "bfloat16", 2.0), (8, "fp8", 1.0), (8, "int8", 132 / 128), (16, "bfloat16", 4.0)],
)
def test_kv_heads_are_repeated_on_more_gpus_than_heads(count: int, kv_dtype: str, each: float) -> None:
    shape = plan(tensor_parallel=count, kv_dtype=kv_dtype).find_shape("llama-3-70b")

    assert shape.kv_bytes_per_token == 2 * 80 * 8 * 128 * each


@pytest.mark.parametrize(("kv_dtype", "part"), [("fp8", 1 / 2), ("int8", 132 / 256)])
def test_smaller_kv_holds_more_tokens_and_is_read_in_less_time(kv_dtype: str, part: float) -> None:
    usual, small = (Deployment.of(plan(tensor_parallel=4, kv_dtype=name), ONE) for name in ("bfloat16", kv_dtype))

    def reading(deployment: Deployment) -> float:
        decodes = (BatchWork(num_decode=1, decode_context=context) for context in (100_000, 1))
        return deployment.model.predict(next(decodes)) - deployment.model.predict(next(decodes))

    assert small.kv_tokens == pytest.approx(usual.kv_tokens / part, abs=2)
    assert reading(small) == pytest.approx(part * reading(usual))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "longest", "count"),
    [
        (40, 10, 100_000, 5),  # 4 GPUs cannot share 10 KV heads
        (16, 2, 1_000_000, 8),  # on 4 GPUs, each KV head takes memory twice
    ],
)
def test_the_hint_names_a_number_of_gpus_that_the_next_plan_accepts(tmp_path, heads, kv_heads, longest, count) -> None:
    config = {"model_type": "llama", "hidden_size": 128 * heads, "intermediate_size": 17920, "num_hidden_layers": 40,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 100352}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def tokens(gpus: int) -> int:
        inputs = PlanInputs(gpu="l4", engine=EngineInput(tensor_parallel=gpus))
        return inputs.kv_tokens(inputs.roofline(str(tmp_path)), longest)

    with pytest.raises(Impossible, match=rf"engine.tensorParallel {count}\)"):
        tokens(1)
    assert tokens(count) >= longest


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(BadInput, match="tensorParallel is 3, which does not divide the 64 heads"):
        plan(tensor_parallel=3).find_shape("llama-3-70b")


def test_an_adapter_of_rank_16_has_the_parameters_that_are_trained() -> None:
    # Fine-tuning all linear layers of Llama-3-8B with rank 16 trains 41,943,040 parameters.
    assert SHAPES["llama-3-8b"].adapter_bytes(16) == 2 * (41_943_040 + 16 * 2 * (128_256 + 4096))


@pytest.mark.parametrize(("name", "gpus"), [("llama-3-70b", 16), ("mixtral-8x7b", 2), ("qwen3-30b-a3b", 8)])
def test_each_gpu_holds_its_part_of_an_adapter_of_all_experts(name: str, gpus: int) -> None:
    shape = SHAPES[name]
    hidden, wide = shape.hidden, shape.heads * shape.head_dim // gpus
    narrow, inner = max(1, shape.kv_heads // gpus) * shape.head_dim, shape.intermediate // gpus
    linear = [(hidden, wide), (hidden, narrow), (hidden, narrow), (wide, hidden)]
    linear += max(1, shape.experts) * [(hidden, inner), (hidden, inner), (inner, hidden)]
    embeddings = 2 * (shape.vocabulary + hidden)

    one = 2 * 16 * (shape.layers * sum(a + b for a, b in linear) + embeddings)

    assert shape.adapter_bytes(16, gpus) == gpus * one


@pytest.mark.parametrize("gpus", [1, 2])
def test_adapters_take_memory_from_kv(gpus: int) -> None:
    usual, inputs = (
        PlanInputs(engine=EngineInput(tensor_parallel=gpus, adapters=number, adapter_rank=64)) for number in (0, 8)
    )
    without, found = (given.kv_tokens(given.roofline("llama-3-8b"), 9) for given in (usual, inputs))

    assert without - found == pytest.approx(8 * SHAPES["llama-3-8b"].adapter_bytes(64, gpus) / 131_072, abs=1)


def test_a_new_gpu_has_pcie_and_a_network_of_100_gigabits_unless_the_inputs_name_rates() -> None:
    figures = {"teraflops": 100, "terabytes_per_second": 1, "memory_gigabytes": 24, "watts": 100, "idle_watts": 10,
               "dollars_per_hour": 1, "purchase_dollars": 1}  # fmt: skip
    linked = GpuInput.model_validate(figures | {"link_gigabytes_per_second": 100})

    usual = GpuInput.model_validate(figures).onto("mine", None)
    assert (usual.link, usual.network) == (PCIE, ETHERNET) == (32e9, 12.5e9)
    assert linked.onto("mine", None).link == 100e9
