"""Trains the tiny Llama-architecture model of the demo and measures it.

The corpus beside this script is divided by document into a training split and a held-out split. The tokenizer and the
model see the training split alone; the figures are bits per byte of the held-out split.

Examples:
  python benchmarks/tiny_model/train.py                    # train, write the demo's model, print the figures
  python benchmarks/tiny_model/train.py --eval-only        # print the figures of the demo's model again
  python benchmarks/tiny_model/train.py --tokens 500_000 --output /tmp/tiny   # a quick run into another directory
"""

import argparse
import functools
import json
import math
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Document, load, split
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

Tokens = NDArray[np.int64]

DEMO_MODEL = Path(__file__).resolve().parents[2] / "worker" / "ballast_cli" / "demo" / "model"

SPECIAL_TOKENS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
END_OF_TEXT, END_OF_TURN = 0, 4
VOCABULARY = 4096
CONTEXT = 2048

ARCHITECTURE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": [END_OF_TEXT, END_OF_TURN],
    "use_cache": True,
}
# Half precision keeps three more bits of each weight than bfloat16 does, and no weight is near its limits.
STORED_DTYPE = torch.float16

# A turn is its role's token, the text and the end token. A text may also come as a list of typed parts.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('the roles are system, user and assistant, not ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] != 'text' %}
                {{- raise_exception('only text can be read, not ' + part['type']) }}
            {%- endif %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

# Tokens in one step of the optimizer.
STEP_TOKENS = 4096
# Most sequences are short, because that is faster. In one step of six they have the full context, so that every
# position is trained.
SHORT, LONG_EVERY = 512, 6
# Tokens whose logits are in memory at one time.
LOSS_CHUNK = 512
# Muon trains the matrices of the layers, AdamW the embedding and the norms. After a million tokens this was at 1.86
# bits per byte on documents set aside from the training split; AdamW alone, at the one rate tried (3e-3), was at 2.19.
MUON: dict[str, Any] = {"lr": 6e-3, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
ADAMW: dict[str, Any] = {"lr": 5e-3, "betas": (0.9, 0.95), "fused": True}
EMBEDDING_WEIGHT_DECAY = 0.1
WARM_UP_STEPS = 100
CHECKPOINT_SECONDS = 180
# Conversations, made of the documents' headings and first paragraphs, add about a tenth to the training tokens.
ANSWER_CHARACTERS = 700
SYSTEM_SHARE = 0.3
SYSTEM_MESSAGE = "Answer from the documentation of Python."

COMPLETION_PROMPT = "The :mod:`json` module"
CHAT_PROMPT = "How do I read a file line by line?"

_HEADING = re.compile(r"^(?:[=*\-~^\"#+]{3,}\n)?([\w`:].*)\n[=*\-~^\"#+]{3,}\n", re.MULTILINE)
_ROLE = re.compile(r":[\w:+-]+:`[~!]?([^`<]+?)(?: *<[^`>]*>)?`")


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer, in which all 256 bytes are tokens, so that every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the tokenizer and its chat template as transformers reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes a complete model directory; each file appears under its name only once it is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as name:
        staging = Path(name)
        weights = {
            key: value.to(STORED_DTYPE).contiguous()
            for key, value in model.state_dict().items()
            if key != "lm_head.weight"  # it is the embedding
        }
        save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(tokenizer, staging)
        # Older readers know the first of these two names, newer ones the second.
        dtype = str(STORED_DTYPE).removeprefix("torch.")
        _write_json(staging / "config.json", ARCHITECTURE | {"torch_dtype": dtype, "dtype": dtype})
        generation = {
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": [END_OF_TEXT, END_OF_TURN],
            "pad_token_id": END_OF_TEXT,
            "do_sample": False,
        }
        _write_json(staging / "generation_config.json", generation)
        for path in staging.iterdir():
            path.chmod(0o644)
            path.replace(directory / path.name)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def conversations(document: Document) -> list[tuple[str, str]]:
    """Makes questions and answers of a document's headings and of the prose that follows them, without the markup."""
    pieces = _HEADING.split(document.text)
    pairs = []
    for heading, body in zip(pieces[1::2], pieces[2::2], strict=True):
        answer = ""
        for paragraph in re.split(r"\n\s*\n", body):
            # What does not begin with a letter is code, a directive or a table; a colon at the end leads to one.
            if not paragraph[:1].isalpha() or paragraph.endswith(":"):
                continue
            if len(answer) + len(paragraph) > ANSWER_CHARACTERS:
                break
            answer = f"{answer}\n\n{_plain(paragraph)}".strip()
        if answer:
            pairs.append((_plain(heading), answer))
    return pairs


def _plain(text: str) -> str:
    return _ROLE.sub(r"\1", text).replace("``", "").replace("::", ":").strip()


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the tokens of a text of any length, without the warning that it is longer than the context."""
    return tokenizer.backend_tokenizer.encode(text).ids


class TokenStream:
    """The training tokens without end: each epoch has every document and conversation once, in a new order."""

    def __init__(self, documents: list[Document], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Tokenizes the documents and conversations; the order of everything follows from the seed."""
        self._random = np.random.default_rng(seed)
        self._parts = [np.array([END_OF_TEXT, *_encode(tokenizer, document.text)]) for document in documents]
        self._parts += [self._chat(tokenizer, *pair) for document in documents for pair in conversations(document)]
        self.epoch_tokens = sum(map(len, self._parts))
        self._pending = np.empty(0, dtype=np.int64)

    def _chat(self, tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> Tokens:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if self._random.random() < SYSTEM_SHARE:
            messages.insert(0, {"role": "system", "content": SYSTEM_MESSAGE})
        return np.array(tokenizer.apply_chat_template(messages, return_dict=False))

    def _epoch(self) -> Tokens:
        return np.concatenate([self._parts[index] for index in self._random.permutation(len(self._parts))])

    def take(self, sequences: int, length: int) -> torch.Tensor:
        """Returns the next tokens, of shape ``(sequences, length + 1)``: inputs, and targets one place further on."""
        while len(self._pending) < sequences * length + 1:
            self._pending = np.concatenate([self._pending, self._epoch()])
        tokens = self._pending[: sequences * length + 1]
        self._pending = self._pending[sequences * length :]
        rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        return torch.from_numpy(rows.copy())


def schedule(steps: int, step: int) -> float:
    """Returns the learning rate of a step as a share of the peak: a linear warm-up, then a cosine to nearly nothing."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Divides the parameters between Muon and AdamW."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [embedding], "weight_decay": EMBEDDING_WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(groups, **ADAMW)]


def differentiate(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Sets the gradients of the mean loss of some sequences.

    The logits are made and differentiated a chunk at a time: for all tokens at once they would outgrow the caches.

    Args:
      model: The model, whose gradients are empty.
      tokens: Inputs and targets, as ``TokenStream.take`` returns them.

    Returns:
      The mean loss in nats per token.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(tokens[:, :-1]).last_hidden_state
    # The chunks' graphs end here, so that the layers are differentiated once, after the last chunk.
    leaf = hidden.detach().requires_grad_()
    targets = tokens[:, 1:].flatten()
    loss = 0.0
    for chunk, chunk_targets in zip(leaf.flatten(0, 1).split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(chunk)
        chunk_loss = functional.cross_entropy(logits.float(), chunk_targets, reduction="sum") / len(targets)
        chunk_loss.backward()
        loss += chunk_loss.item()
    hidden.backward(leaf.grad)
    return loss


def train(arguments: argparse.Namespace, documents: list[Document]) -> None:
    """Trains the tokenizer and the model, and writes the model directory."""
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(documents)
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
    write_model(model, tokenizer, arguments.checkpoint)
    stream = TokenStream(documents, AutoTokenizer.from_pretrained(arguments.checkpoint), arguments.seed)
    steps = math.ceil(arguments.tokens / STEP_TOKENS)
    print(f"{model.num_parameters():,} parameters, {stream.epoch_tokens:,} tokens in an epoch, {steps:,} steps")

    optimizers = make_optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, functools.partial(schedule, steps)) for o in optimizers]
    smooth_loss, saved = math.log(VOCABULARY), time.monotonic()
    with tqdm(total=steps * STEP_TOKENS, unit="tok", unit_scale=True, desc="training", mininterval=5) as bar:
        for step in range(steps):
            length = CONTEXT if step % LONG_EVERY == LONG_EVERY - 1 else SHORT
            loss = differentiate(model, stream.take(STEP_TOKENS // length, length))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in zip(optimizers, schedules, strict=True):
                optimizer.step()
                rate.step()
            model.zero_grad()
            smooth_loss += 0.05 * (loss - smooth_loss)
            bar.set_postfix(loss=f"{smooth_loss:.3f}", refresh=False)
            bar.update(STEP_TOKENS)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                write_model(model, tokenizer, arguments.checkpoint)
                saved = time.monotonic()
    write_model(model, tokenizer, arguments.output)


@torch.inference_mode()
def model_nats(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, document: Document) -> float:
    """Returns the negative log-likelihood of a whole document, in nats.

    The context is as long as the model's and moves on by half its length, so that every token is scored once, and from
    the first move on with at least half the context before it. The context of the first token is the start of a
    document, which is not scored.
    """
    ids = torch.tensor([[END_OF_TEXT, *_encode(tokenizer, document.text)]])
    if tokenizer.decode(ids[0, 1:]) != document.text:
        raise AssertionError(f"the tokens of {document.name} are not its text")
    nats, scored = 0.0, 1
    while scored < ids.shape[1]:
        end = min(ids.shape[1], CONTEXT if scored == 1 else scored + CONTEXT // 2)
        start = max(0, end - CONTEXT)
        logits = model(ids[:, start : end - 1], use_cache=False).logits[0, scored - start - 1 :]
        nats += functional.cross_entropy(logits, ids[0, scored:end], reduction="sum").item()
        scored = end
    return nats


def evaluate(directory: Path, held_out: list[Document]) -> None:
    """Prints the held-out figure of a saved model, and what the model writes."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {model.num_parameters():,} parameters, {size:,} bytes")

    progress = tqdm(held_out, desc="evaluating", unit="doc")
    nats = sum(model_nats(model, tokenizer, document) for document in progress)
    print(f"held-out bits per byte: {nats / math.log(2) / sum(document.size for document in held_out):.4f}")

    prompt = tokenizer(COMPLETION_PROMPT, return_tensors="pt")
    print(f"\n--- completion, greedy\n{_greedy(model, tokenizer, prompt)}")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT_PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    print(f"\n--- chat, greedy\n{_greedy(model, tokenizer, chat)}")


def _greedy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, torch.Tensor]) -> str:
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=120)[0])


def main() -> None:
    """Trains unless told not to, then evaluates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEMO_MODEL, help="the model directory (default: the demo's)")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the model in --output, train nothing")
    parser.add_argument("--tokens", type=int, default=6_000_000, help="tokens to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "ballast-tiny-model",
        help="where the unfinished model is saved every few minutes (default: %(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training, held_out = split(load())
    started = time.monotonic()
    if not arguments.eval_only:
        train(arguments, training)
        print(f"trained in {(time.monotonic() - started) / 60:.1f} minutes on {arguments.threads} threads")
    evaluate(arguments.output, held_out)


if __name__ == "__main__":
    main()
