"""`ballast-vllm` serves a quantized checkpoint with a quantized KV cache."""

from __future__ import annotations

import pytest
from small_models import config_of, make_gptq

pytestmark = pytest.mark.timeout(900)


def test_a_checkpoint_with_weights_of_4_bits_is_served_with_fp8_kv(launch, tmp_path):
    model = make_gptq(tmp_path / "gptq")
    engine = {
        "quantization": "gptq",
        "kvDtype": "fp8",
        "kvMemoryMebibytes": 64,
        "vllm": {"args": ["--enforce-eager", "--enable-mfu-metrics"]},
    }
    config = config_of(model, slots=4, model={"dtype": "bfloat16"}, engine=engine)
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    with launch(tmp_path / "worker.yaml", config) as serving, serving.client() as client:
        found = [
            client.post("/v1/completions", json=body, headers={"x-ballast-class": name}).json()
            for name in ("online", "offline")
        ]
        series = serving.series()

    assert [answer["usage"]["completion_tokens"] for answer in found] == [24, 24]
    assert found[0]["choices"][0]["text"] == found[1]["choices"][0]["text"]
    (about,) = [name for name in series if name.startswith("vllm:cache_config_info")]
    assert 'cache_dtype="fp8"' in about
    assert any(value > 0 for name, value in series.items() if name.startswith("vllm:estimated_flops_per_gpu_total"))
