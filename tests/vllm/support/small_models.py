"""Models with random weights, and a tokenizer of bytes."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any


def make_llama(directory: Path, *, spread: float | None = None, seed: int = 3) -> Path:
    """Write a float32 Llama; with a large `spread` of the weights its greedy answers wander."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    more = {} if spread is None else {"initializer_range": spread}
    config = llama_config(num_hidden_layers=4, vocab_size=258, tie_word_embeddings=spread is None, **more)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def llama_config(**fields):
    """Return the configuration of a small Llama."""
    from transformers import LlamaConfig

    usual = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 688,
        "max_position_embeddings": 2048,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return LlamaConfig(**usual | fields)


GROUP = 32
"""Rows of a quantized weight that share a scale."""


def make_gptq(directory: Path) -> Path:
    """Write a Llama whose layers have weights of 4 bits in GPTQ's format; its greedy answers wander.

    The kernel of vLLM on a CPU needs sizes that are multiples of 32.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    config = llama_config(
        num_hidden_layers=2,
        vocab_size=258,
        tie_word_embeddings=False,
        initializer_range=0.12,
        intermediate_size=704,
        dtype="bfloat16",
    )
    weights = {}
    for name, weight in LlamaForCausalLM(config).state_dict().items():
        if ".layers." in name and weight.dim() == 2:
            layer = name.removesuffix("weight")
            weights |= {f"{layer}{part}": found for part, found in _packed(weight.float()).items()}
        else:
            weights[name] = weight.to(torch.bfloat16).contiguous()
    stated = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    config.quantization_config = {"quant_method": "gptq", **stated}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(directory)
    return directory


def _packed(weight):
    """Return a weight as GPTQ stores it: eight values of 4 bits in each integer, and a scale for each group of rows."""
    import torch

    rows, columns = weight.shape[1], weight.shape[0]
    groups = weight.T.contiguous().reshape(-1, GROUP, columns)
    scales = groups.abs().amax(1) / 7
    levels = (groups / scales[:, None]).round().clamp(-8, 7).to(torch.int64).reshape(rows // 8, 8, columns) + 8
    packed = sum(levels[:, place] << 4 * place for place in range(8))
    return {
        "qweight": packed.to(torch.int32),
        "scales": scales.to(torch.float16),
        "qzeros": torch.full((rows // GROUP, columns // 8), 0x77777777, dtype=torch.int32),
        "g_idx": torch.arange(rows, dtype=torch.int32) // GROUP,
    }


def make_idefics(directory: Path) -> Path:
    """Write a float32 Idefics3: it sees an image as 4 tokens, and knows the tokens that enclose reasoning."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(3)
    image = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    tokenizer = make_tokenizer("<think>", "</think>", *image)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
        },
        text_config=llama_config(
            num_hidden_layers=2, vocab_size=len(tokenizer), pad_token_id=257, initializer_range=0.12
        ),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=257,
        tie_word_embeddings=False,
    )
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    edge = {"longest_edge": 56}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(directory)
    return directory


def picture(color: str) -> str:
    """Return an image of one color as a data URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (80, 60), color).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_adapter(directory: Path, model: Path, *, seed: int, rank: int = 4, scale: float = 1.0) -> Path:
    """Write a LoRA adapter for a Llama, with random weights of the standard deviation `scale`."""
    import json

    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // heads * config["num_key_value_heads"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = scale * torch.randn(rank, hidden, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = scale * torch.randn(size, rank, generator=generator)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    about = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(outputs), "peft_type": "LORA", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory


def make_tokenizer(*special: str):
    """Return a tokenizer with one token for each byte, and more tokens that stand for themselves."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def config_of(folder: Path, /, *, slots: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a worker that serves a model as `m`; `sections` add fields, or change them."""
    usual: dict[str, Any] = {
        "model": {"uri": f"file://{folder}", "servedName": "m", "dtype": "float32", "maxModelLen": 512},
        "engine": {"backend": "vllm", "kvMemoryMebibytes": 128, "vllm": {"args": ["--enforce-eager"]}},
    }
    return usual | {"slots": slots} | {name: usual.get(name, {}) | fields for name, fields in sections.items()}
