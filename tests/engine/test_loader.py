"""A checkpoint directory loads, or a sentence says what is wrong with it and what to do."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from batches import Part, logits_of, make_batch
from safetensors.torch import load_file, save_file

from ballast_engine.build import build_engine
from ballast_engine.errors import InvalidCheckpoint, InvalidOptions
from ballast_engine.executor import Executor
from ballast_engine.loader import load, set_threads
from ballast_engine.models.config import parse_config
from ballast_engine.options import EngineOptions
from ballast_engine.request import SamplingParams


@pytest.fixture
def directory(checkpoints, tmp_path):
    """A private copy that a test may damage."""
    copy = tmp_path / "model"
    shutil.copytree(checkpoints("llama, biases everywhere")[0], copy)
    return copy


def load_here(directory, **changes):
    return load(directory, **{"attention": "sdpa", "threads": 1, **changes})


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**content, **changes}.items() if value != "DROP"}))


def edit_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory):
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()


def edit_index(directory, file):
    path = directory / "model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"]
    edit(path, weight_map={name: file if "00001" in held else held for name, held in names.items()})


def test_a_loaded_model_tells_its_size(directory):
    loaded = load_here(directory, attention="auto")
    tensors = load_file(directory / "model.safetensors")

    assert loaded.num_params == sum(tensor.numel() for tensor in tensors.values())
    assert loaded.dtype is torch.float32


@pytest.mark.parametrize("attention", ["sdpa", "cpu"])
def test_a_sharded_checkpoint_computes_what_the_single_file_computes(directory, attention):
    batch = make_batch([Part(list(range(3, 30)), 0, range(4), sampling=SamplingParams(temperature=0))], 8)
    single = logits_of(Executor(load_here(directory, attention=attention), num_blocks=4, block_tokens=8), batch)
    shard(directory)
    sharded = logits_of(Executor(load_here(directory, attention=attention), num_blocks=4, block_tokens=8), batch)

    torch.testing.assert_close(single, sharded)


def test_a_head_that_repeats_the_embedding_takes_no_memory(checkpoints, tmp_path):
    directory = shutil.copytree(checkpoints("llama, tied embeddings, one key head")[0], tmp_path / "model")
    tied = load_here(directory)
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    loaded = load_here(directory)

    assert loaded.weights.head is loaded.weights.embedding
    assert loaded.num_params == tied.num_params


def test_a_model_without_an_end_token_is_logged(directory, caplog):
    for name in ("config.json", "generation_config.json"):
        edit(directory / name, eos_token_id=None)
    build_engine(EngineOptions(directory, attention="sdpa", threads=1, slots=1, kv_memory_bytes=1 << 20))

    assert sum("model names no end token" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("attention", ["sdpa", "cpu"])
def test_dummy_weights_need_only_the_configuration_and_repeat(tmp_path, checkpoints, attention):
    shutil.copy(checkpoints("qwen2")[0] / "config.json", tmp_path)
    batch = make_batch([Part(list(range(3, 30)), 0, range(4), sampling=SamplingParams(temperature=0))], 8)
    first, second = (
        Executor(load_here(tmp_path, load_format="dummy", attention=attention), num_blocks=4, block_tokens=8)
        for _ in range(2)
    )

    assert torch.equal(logits_of(first, batch), logits_of(second, batch))
    assert 0.1 < float(logits_of(first, batch).std()) < 10


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "max_position_embeddings": 64,
}
SLIDING = ["full_attention"] * 2 + ["sliding_attention"]
DAMAGES = {
    "no directory": (shutil.rmtree, "not a directory"),
    "no config.json": (lambda d: (d / "config.json").unlink(), r"config\.json does not exist"),
    "config.json is cut off": (lambda d: (d / "config.json").write_text('{"a": '), "not readable JSON"),
    "config.json is a list": (lambda d: (d / "config.json").write_text("[]"), "JSON list"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "load format 'dummy'"),
    "weights of another format": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"found pytorch_model\.bin",
    ),
    "header is noise": (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 4000), "not a whole safetensors"),
    "file is empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "not a whole safetensors"),
    "file is cut off": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        "not a whole safetensors",
    ),
    "a tensor is missing": (
        lambda d: edit_weights(d, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"lacks 1 of the 51 tensors .*layers\.1\.mlp\.up_proj",
    ),
    "a tensor too many": (
        lambda d: edit_weights(d, lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)})),
        r"does not use|config\.json of these weights",
    ),
    "a tensor of another shape": (
        lambda d: edit_weights(d, lambda t: t.update({"model.norm.weight": torch.zeros(47)})),
        r"model\.norm\.weight has shape \[47\].*\[48\]",
    ),
    "a tensor of integers": (
        lambda d: edit_weights(d, lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)})),
        "quantized",
    ),
    "a shard is missing": (
        lambda d: (shard(d), (d / "model-00002-of-00002.safetensors").unlink()),
        r"lacks 1 of 2 weight files \(model-00002",
    ),
    "an index without a map": (
        lambda d: (shard(d), (d / "model.safetensors.index.json").write_text("{}")),
        "no weight_map",
    ),
    "an index that names a file elsewhere": (
        lambda d: (
            shard(d),
            shutil.copy(d / "model-00001-of-00002.safetensors", d.parent / "other.safetensors"),
            edit_index(d, "../other.safetensors"),
        ),
        r"names \.\./other\.safetensors, expected files of the checkpoint directory",
    ),
    "an index that names a file by its whole path": (
        lambda d: (shard(d), edit_index(d, str(d / "model-00001-of-00002.safetensors"))),
        "expected files of the checkpoint directory without a folder",
    ),
    "config.json is nested without end": (
        lambda d: (d / "config.json").write_text("[" * 100_000),
        "not readable JSON",
    ),
    "a head of another shape beside a configuration that ties it": (
        lambda d: (
            edit(d / "config.json", tie_word_embeddings=True),
            edit_weights(d, lambda t: t.update({"lm_head.weight": torch.zeros(194, 48)})),
        ),
        r"lm_head\.weight has shape \[194, 48\]",
    ),
}
CONFIGS = {
    "biases that config.json denies": ({"mlp_bias": False}, "results would be wrong"),
    "an activation that is a list": ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
    "a norm that is not a number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, which must be above 0"),
    "a rope without a base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        "rope_theta is 0, which must be above 0",
    ),
    "a rope scaled by nothing": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "factor is 0, which must be above 0",
    ),
    "a rope whose bounds are equal": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor is 4, expected less than 4",
    ),
    "a hundred million layers": (
        {"num_hidden_layers": 100_000_000},
        "num_hidden_layers is 100000000, which must be at least 1, at most 10000",
    ),
    "another architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "GPT2LMHeadModel; this engine runs LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "no architecture": ({"architectures": "DROP"}, "names the architecture nothing"),
    "quantized": ({"quantization_config": {"bits": 4}}, "or engine.backend: vllm"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "yarn": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "type 'yarn'; this engine computes default, linear, llama3",
    ),
    "dynamic rope in the older spelling": (
        {"rope_parameters": "DROP", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "type 'dynamic'",
    ),
    "rope without its factor": ({"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
    "yarn beside the parameters of the rope": (
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "type 'yarn'",
    ),
    "types of fewer layers": (
        {"layer_types": ["full_attention"] * 2},
        r"layer_types is \['full_attention', 'full_attention'\], expected .* for each of the 3 layers",
    ),
    "a layer of another type": (
        {"layer_types": ["full_attention"] * 2 + ["chunked_attention"]},
        "expected full_attention for each of the 3 layers",
    ),
    "windows in a model without windows": (
        {"sliding_window": 8, "layer_types": SLIDING},
        "expected full_attention for each of the 3 layers",
    ),
    "windows of a Qwen that does not use them": (
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "layer_types": SLIDING},
        "expected full_attention for each of the 3 layers",
    ),
    "a size in words": ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "no width": ({"hidden_size": "DROP"}, "has no 'hidden_size'"),
    "heads that cannot share": ({"num_key_value_heads": 3}, "cannot share 3"),
    "an odd head": ({"head_dim": 11}, "head_dim is 11"),
    "partly rotated heads": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
}
"""Fields of config.json."""


@pytest.mark.parametrize("damage", [*DAMAGES, *CONFIGS])
def test_a_damaged_checkpoint_is_refused_with_the_reason(directory, damage):
    change, message = (DAMAGES | CONFIGS)[damage]
    if damage in CONFIGS:
        edit(directory / "config.json", **change)
    else:
        change(directory)

    with pytest.raises(InvalidCheckpoint, match=message):
        load_here(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "'int8' is not a data type"),
        ({"attention": "flash"}, "'flash' is not an attention backend"),
        ({"attention": "cpu", "dtype": "float16"}, "does not support torch.float16"),
    ],
    ids=str,
)
def test_options_that_cannot_be_met_are_refused(directory, changes, message):
    with pytest.raises(InvalidOptions, match=message):
        load_here(directory, **changes)


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [
        ({"rope_theta": 500000.0}, "default"),
        ({"rope_theta": 500000.0, "rope_scaling": None}, "default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "default"),
        ({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500000, "factor": 2}}, "linear"),
    ],
    ids=str,
)
def test_both_spellings_of_the_rotary_embedding_are_read(spelling, kind):
    rope = parse_config({"architectures": ["LlamaForCausalLM"], **SIZES, **spelling}).rope

    assert (rope.kind, rope.theta) == (kind, 500000.0)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": None}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 8}, [8, 8]),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            [None, 8],
        ),
        ({"sliding_window": 8}, [None, None]),
    ],
    ids=str,
)
def test_a_layer_has_the_window_of_its_type(changes, windows):
    config = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "max_window_layers": 0, **SIZES}

    assert parse_config(config | changes | {"num_hidden_layers": 2}).windows == tuple(windows)


@pytest.mark.parametrize(
    ("cores", "wanted", "threads"), [({0, 1}, 0, 1), ({0}, 0, 1), (set(range(8)), 0, 7), ({0, 1}, 2, 2)]
)
def test_one_core_is_left_to_whoever_feeds_the_engine(monkeypatch, cores, wanted, threads):
    given = []
    monkeypatch.setattr("ballast_engine.loader.os", SimpleNamespace(sched_getaffinity=lambda _: cores))
    monkeypatch.setattr("ballast_engine.loader.torch.set_num_threads", given.append)

    assert set_threads(wanted) == threads
    assert given == [threads]
