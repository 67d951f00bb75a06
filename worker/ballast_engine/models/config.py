"""Read the shape of a model from the `config.json` of a checkpoint. Unsupported fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

from ballast_engine.errors import InvalidCheckpoint

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE = ("default", "linear", "llama3")

_LAYER_TYPES = ("full_attention", "sliding_attention")
_MOST_LAYERS = 10_000
_LARGEST = 1e12
"""Largest number of a rotary embedding or a norm."""

RopeKind = Literal["default", "linear", "llama3"]
Json = Mapping[str, object]
_T = TypeVar("_T", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. The last three fields belong to `llama3`."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the computation depends on, except the weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: how many of the last tokens a token attends to, including itself; None: all of them."""

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim


class _Fields:
    """Typed access to a JSON object. Every error names the file and the field."""

    def __init__(self, fields: Json, where: str) -> None:
        self.fields = fields
        self.where = where

    def get(self, name: str, default: _T) -> _T:
        value = self.fields.get(name)
        if value is None:
            return default
        return self._checked(name, value, type(default))

    def need(self, name: str, kind: type[_T]) -> _T:
        value = self.fields.get(name)
        if value is None:
            raise InvalidCheckpoint(f"{self.where} has no {name!r}: use a complete Hugging Face config.json.")
        return self._checked(name, value, kind)

    def count(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        value = self.need(name, int) if default is None else self.get(name, default)
        if not 1 <= value <= most:
            raise InvalidCheckpoint(f"{self.where}: {name} is {value}, which must be at least 1, at most {most}.")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.need(name, float) if default is None else self.get(name, default)
        if not 0 < value <= _LARGEST:  # not NaN, either, which JSON of Python may contain
            raise InvalidCheckpoint(f"{self.where}: {name} is {value}, which must be above 0, at most {_LARGEST:g}.")
        return float(value)

    def _checked(self, name: str, value: object, kind: type[_T]) -> _T:
        fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not fits or (kind is not bool and isinstance(value, bool)):
            raise InvalidCheckpoint(f"{self.where}: {name} is {value!r}, which must be of type {kind.__name__}.")
        return cast("_T", value)


def read_json(path: Path) -> Json:
    """Read one JSON object of a checkpoint."""
    if not path.is_file():
        raise InvalidCheckpoint(f"{path} does not exist: a checkpoint directory needs it; download the model again.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not readable JSON ({error}): download the model again.") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(
            f"{path} contains a JSON {type(content).__name__}, expected an object: download the model again."
        )
    return content


def parse_config(config: Json, *, where: str = "config.json") -> ModelConfig:
    """Return the ModelConfig of a `config.json`, in the spelling of transformers 4 or 5."""
    fields = _Fields(config, where)
    architecture = _architecture(config, where)
    _refuse_unsupported(config, where)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads if architecture == "LlamaForCausalLM" else None)
    head_dim = fields.count("head_dim", 128 if architecture == "Qwen3ForCausalLM" else max(1, hidden // heads))
    if heads % kv_heads:
        raise InvalidCheckpoint(f"{where}: {heads} attention heads cannot share {kv_heads} key/value heads evenly.")
    if head_dim % 2:
        raise InvalidCheckpoint(f"{where}: head_dim is {head_dim}; rotary embeddings need an even number.")
    has_bias_option = architecture in {"LlamaForCausalLM", "Qwen3ForCausalLM"}
    attention_bias = has_bias_option and fields.get("attention_bias", default=False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=fields.count("max_position_embeddings"),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=_rope(config, where, max_positions=fields.count("max_position_embeddings")),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.get("mlp_bias", default=False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_embeddings=fields.get("tie_word_embeddings", default=False),
        windows=_windows(fields, architecture),
    )


def _architecture(config: Json, where: str) -> str:
    named = config.get("architectures")
    found = [str(name) for name in named] if isinstance(named, list) else []
    for name in found:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    raise InvalidCheckpoint(
        f"{where} names the architecture {', '.join(found) or 'nothing'}; this engine runs "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}: choose such a model, or use engine.backend: vllm."
    )


def _refuse_unsupported(config: Json, where: str) -> None:
    if config.get("quantization_config") is not None:
        raise InvalidCheckpoint(
            f"{where} describes a quantized checkpoint, which this engine does not support: use the original, or "
            "engine.backend: vllm."
        )
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise InvalidCheckpoint(f"{where}: hidden_act is {act!r}; this engine computes silu.")


def _rope(config: Json, where: str, *, max_positions: int) -> Rope:
    """Read `rope_scaling` (transformers 4), or else `rope_parameters` (transformers 5), with `rope_theta` beside it."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise InvalidCheckpoint(f"{where}: {name} is {given!r}, which must be an object or null.")
    if any(isinstance(value, dict) for value in given.values()):
        raise InvalidCheckpoint(f"{where}: {name} differs by layer type; this engine has one for all layers.")
    found = {key: value for key, value in given.items() if value is not None}
    kind = found.get("rope_type") or found.get("type") or "default"
    fields = _Fields({"rope_theta": config.get("rope_theta"), **found}, f"{where} ({name})")
    theta = fields.positive("rope_theta", 10_000.0)
    for partial in (config.get("partial_rotary_factor"), found.get("partial_rotary_factor")):
        if partial not in (None, 1.0):
            raise InvalidCheckpoint(
                f"{where}: partial_rotary_factor is {partial!r}; this engine rotates whole heads (1.0)."
            )
    match kind:
        case "default":
            return Rope(theta=theta)
        case "linear":
            return Rope(kind="linear", theta=theta, factor=fields.positive("factor"))
        case "llama3":
            low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
            if low >= high:
                raise InvalidCheckpoint(f"{fields.where}: low_freq_factor is {low:g}, expected less than {high:g}.")
            return Rope(
                kind="llama3",
                theta=theta,
                factor=fields.positive("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_positions=fields.count("original_max_position_embeddings", max_positions),
            )
    raise InvalidCheckpoint(
        f"{where}: rotary embedding of type {kind!r}; this engine computes {', '.join(SUPPORTED_ROPE)}: choose a model "
        f"with one of these, or remove the scaling from config.json and stay within the original context."
    )


def _windows(fields: _Fields, architecture: str) -> tuple[int | None, ...]:
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    is_mistral = architecture == "MistralForCausalLM"
    has_windows = is_mistral or (architecture != "LlamaForCausalLM" and fields.get("use_sliding_window", default=False))
    first = 0 if is_mistral else fields.get("max_window_layers", 28) if has_windows else num_layers
    known = _LAYER_TYPES if has_windows else _LAYER_TYPES[:1]
    kinds = fields.fields.get("layer_types") or [_LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise InvalidCheckpoint(
            f"{fields.where}: layer_types is {str(kinds)[:100]}, expected {' or '.join(known)} for each of the "
            f"{num_layers} layers: for other layers, use engine.backend: vllm."
        )
    if not has_windows or fields.fields.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = fields.count("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
