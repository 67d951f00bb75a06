"""The shape of a model, from its Hugging Face `config.json`: the bytes of its weights, and the cost of a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ballast_sim.errors import BadInput

_DECODERS = frozenset({"llama", "mistral", "phi3", "qwen2", "qwen3"})
_MIXTURES = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
"""Mixtures of experts, with the key for the size of an expert."""
_WINDOWED = frozenset({"mistral", "mixtral", "phi3"})
"""Types whose `sliding_window` is in use unless it is null."""
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta"})


class Quantization(StrEnum):
    """The storage of weights. int8 and int4 are weight-only (computed in bfloat16), and fp8 is computed in fp8."""

    NONE = "none"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight. int4 has a 16-bit scale and a 4-bit zero for each 128 weights, as in AWQ and GPTQ."""
        return {"none": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2.5 / 128}[self.value]


_STORED = {(4, "int", False): Quantization.INT4, (8, "float", True): Quantization.FP8} | dict.fromkeys(
    ((8, "int", False), (8, "int", True), (8, "float", False)), Quantization.INT8
)
"""Quantization by the bits and the type of a weight, and by whether inputs are quantized, too."""

KV_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int8": 1.0 + 4 / 128}
"""Bytes of one number in the KV cache. int8 has a 32-bit scale for each token and head of 128 numbers, as in vLLM."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer: a decoder (grouped-query attention; a gated MLP or a mixture of them) or a BERT-style encoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Intermediate size of the MLP, or of one expert."""
    vocabulary: int
    max_context: int
    """Most tokens of prompt and answer: the context of the model, or its sliding window."""
    is_tied: bool = False
    """Whether the output projection is the embedding table."""
    is_encoder: bool = False
    """Whether it generates nothing: a BERT-style encoder, or a decoder that serves embeddings."""
    is_bert: bool = False
    """Whether tokens also attend to later ones, and an MLP has two matrices."""
    kv_bytes: float = 2.0
    """Bytes of one number in the KV cache."""
    experts: int = 0
    """Experts in each layer; 0 for a dense model."""
    experts_per_token: int = 0
    is_sliding: bool = False
    """Whether the sliding window is shorter than the context. Within it, such layers are as the others."""
    quantization: Quantization | str = Quantization.NONE
    """Quantization that the configuration states, or the name of one that this package has no figures for."""

    def weights(self, asked: Quantization | None = None) -> Quantization:
        """Return the format of the weights: as asked, or as the configuration states; raise BadInput if unknown."""
        found = asked or self.quantization
        if isinstance(found, Quantization):
            return found
        raise BadInput(
            f"{self.name}: a plan has no figures for the quantization in its config.json, {found}. Set `quantization` "
            "(--quantization) to none, fp8, int8 or int4, whichever takes about as many bytes"
        )

    @property
    def longest(self) -> str:
        """The most tokens of prompt and answer, with the reason if the context has more."""
        return f"{self.max_context:,} tokens" + (", its sliding window" if self.is_sliding else "")

    def divides(self, gpus: int) -> bool:
        """Return whether GPUs can have equal parts of the heads. A KV head may be on several GPUs."""
        return not (self.heads % gpus or max(self.kv_heads, gpus) % min(self.kv_heads, gpus))

    @property
    def expert_share(self) -> float:
        """Share of the experts that one token passes; 0 for a dense model."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts in all layers."""
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    @property
    def active_parameters(self) -> float:
        """Weights of the layers that one token passes."""
        return self.layer_parameters - self.expert_parameters * (1 - self.expert_share)

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        if self.experts:
            return self.layers * (attention + self.hidden * self.experts) + self.expert_parameters
        mlp = (2 if self.is_bert else 3) * self.hidden * self.intermediate
        return self.layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection. A step reads them once, and uses them for each sampled token."""
        return 0 if self.is_encoder else self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, without norms and biases (well under 0.1 %)."""
        embedding = self.vocabulary * self.hidden
        return self.layer_parameters + embedding + (0 if self.is_tied or self.is_encoder else self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache of one token. An encoder has none."""
        return 0.0 if self.is_encoder else 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def check(self, what: str, prompt_tokens: int, output_tokens: int) -> None:
        """Check that the mean lengths of requests fit the model; raise BadInput if they do not."""
        if self.is_encoder == bool(output_tokens):
            generates = "generates: outputTokens is 1 or more, or given as 0 if it serves embeddings"
            raise BadInput(
                f"{what}: {self.name} {'is an encoder: outputTokens is 0' if self.is_encoder else generates}"
            )
        tokens = prompt_tokens + output_tokens
        if tokens > self.max_context:
            raise BadInput(
                f"{what}: prompt and answer have {tokens:,} tokens, but {self.name} takes at most {self.longest}"
            )

    @property
    def attention_flops_per_pair(self) -> float:
        """Operations for one token that attends to one token: scores and weighted sum, in every layer and head."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def adapter_bytes(self, rank: int, gpus: int = 1) -> float:
        """Return the bytes that vLLM holds for a LoRA adapter in 16 bits, on all GPUs that share the model.

        Each GPU holds the sides of the hidden states and of the vocabulary in full, and its part of the other sides.
        """
        sizes = 4 * gpus * self.hidden + 2 * (self.heads + max(self.kv_heads, gpus)) * self.head_dim
        mlps = (2 if self.is_bert else 3) * max(self.experts, 1)
        sizes += mlps * (gpus * self.hidden + self.intermediate)
        embeddings = 0 if self.is_encoder else 2 * gpus * (self.hidden + self.vocabulary)
        return 2.0 * rank * (self.layers * sizes + embeddings)

    def weight_bytes(self, quantization: Quantization = Quantization.NONE) -> float:
        """Return the bytes of the weights in memory. Embedding and output projection stay in 16 bits."""
        kept = (self.parameters - self.layer_parameters) * 2.0
        return self.layer_parameters * quantization.weight_bytes + kept


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 32768),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960),
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, experts=8, experts_per_token=2),
        ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, 40960, experts=128, experts_per_token=8),
        ModelShape("bge-base", 12, 768, 12, 12, 64, 3072, 30522, 512, is_encoder=True, is_bert=True),
        ModelShape("bge-large", 24, 1024, 16, 16, 64, 4096, 30522, 512, is_encoder=True, is_bert=True),
    )
}


def shape(name: str) -> ModelShape:
    """Find a model by name, or read its shape from the path of a `config.json` or of its directory.

    Raises:
        BadInput: the name is unknown and no such file exists, or the file is not a supported configuration.
    """
    if name.lower() in SHAPES:
        return SHAPES[name.lower()]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(SHAPES)
        raise BadInput(f"unknown model {name!r}; known are {known}. The path of a model's config.json works, too")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        beside = path.with_name("hf_quant_config.json")  # of older versions of ModelOpt, and read by vLLM, too
        stated = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path}: found {type(config).__name__}, expected the JSON object of a Hugging Face config")
    return from_config({"compression_config": stated} | config, path.parent.name or str(path))


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read the shape from a Hugging Face configuration.

    Raises:
        BadInput: the architecture is not supported, or a size is missing.
    """
    kind = config.get("model_type")
    if kind not in _DECODERS | _ENCODERS | _MIXTURES.keys():
        known = ", ".join(sorted(_DECODERS | _ENCODERS | _MIXTURES.keys()))
        raise BadInput(f"model {name}: model_type is {kind!r}; supported are {known}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise BadInput(
            f"model {name}: some of its layers have no experts; supported are experts in each layer or in none"
        )

    def size(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if not isinstance(value, int) or value < 1:
            raise BadInput(f"model {name}: {' or '.join(keys)} is {value!r}; expected a whole number, 1 or more")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    keys = ("num_local_experts", "num_experts"), ("num_experts_per_tok",)
    experts, used = (size(*each) if kind in _MIXTURES else 0 for each in keys)
    if used > experts:
        raise BadInput(f"model {name}: num_experts_per_tok is {used}, more than its {experts} experts")
    layers, context = size("num_hidden_layers"), size("max_position_embeddings", default=2048)
    window = size("sliding_window") if _has_window(config, name, layers) else context
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        intermediate=size(_MIXTURES.get(kind, "intermediate_size")),
        vocabulary=size("vocab_size"),
        max_context=min(context, window),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        is_encoder=kind in _ENCODERS,
        is_bert=kind in _ENCODERS,
        experts=experts,
        experts_per_token=used,
        is_sliding=window < context,
        quantization=_quantization(config),
    )


def _has_window(config: Mapping[str, Any], name: str, layers: int) -> bool:
    """Return whether some layers of a Hugging Face configuration have a sliding window; raise BadInput for others."""
    has_size = config.get("sliding_window") is not None
    if types := config.get("layer_types"):
        if not isinstance(types, list) or set(map(str, types)) - {"full_attention", "sliding_attention"}:
            raise BadInput(f"model {name}: layer_types has layers other than full_attention and sliding_attention")
        return "sliding_attention" in types and has_size
    if config["model_type"] in _WINDOWED:
        return has_size
    later = config.get("max_window_layers")  # the first layer with a window
    return has_size and bool(config.get("use_sliding_window")) and not (isinstance(later, int) and later >= layers)


def _quantization(config: Mapping[str, Any]) -> Quantization | str:
    """Return the quantization of a Hugging Face configuration, or its name if layers differ or it has no figures."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return Quantization.NONE
    try:
        stated = stated.get("quantization", stated)
        method = stated.get("quant_method", stated.get("quant_algo"))
        if method in {"awq", "gptq", "auto-round"}:
            found = {(stated.get("bits", stated.get("w_bit")), "int", False)}
        elif method in {"fp8", "fbgemm_fp8"} or "FP8" in {method, stated.get("quant_algo")}:
            found = {(8, "float", True)}
        else:
            groups = [(each["weights"], each.get("input_activations")) for each in stated["config_groups"].values()]
            found = {(weights["num_bits"], weights["type"], bool(inputs)) for weights, inputs in groups}
        [kind] = {_STORED[each] for each in found}
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"quant_method {method!r}" if isinstance(stated, Mapping) else repr(stated)
    return kind
