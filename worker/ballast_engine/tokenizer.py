"""Convert text to tokens and back, with the files of a Hugging Face checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ballast_engine.chat import ChatTemplate, Join
from ballast_engine.errors import InvalidChat, InvalidCheckpoint
from ballast_engine.models.config import read_json
from ballast_engine.token_bytes import TokenBytes

SPECIAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of one checkpoint; safe to call from several threads.

    It does what `tokenizer.json` says, with the tokens that only the configuration files have. `transformers` does the
    same, except for classes with own rules: its `LlamaTokenizer` adds a blank only to a text that begins without one.
    """

    def __init__(self, directory: Path | str, join: Join = "".join) -> None:
        """Read `tokenizer.json`, and the configuration files beside it if they exist. `join` is for chat templates.

        Raises:
            InvalidCheckpoint: a file is missing or cannot be read.
        """
        self.directory, self._join = Path(directory), join
        files = [_read_json(self.directory / name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
        self._config = {key: value for file in files for key, value in file.items() if value is not None}
        self._backend = _load_backend(self.directory / "tokenizer.json")
        names = [*SPECIAL_NAMES, *(name for name in self._config if name.endswith("_token"))]
        self.special_tokens = {name: text for name in names if (text := _special_text(self._config.get(name)))}
        self._add_tokens()
        self.eos_ids = self._eos_ids()
        """Tokens that end an answer: those of `generation_config.json`, `config.json` and the tokenizer."""

    def _add_tokens(self) -> None:
        """Add the tokens that only the configuration files have, and mark special tokens, as `transformers` does."""
        backend, get, special = self._backend, self._config.get, self.special_tokens.values()
        tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        declared = get("added_tokens_decoder")
        try:
            more = get("extra_special_tokens") or {}
            more = [*more.values(), *get("additional_special_tokens", ())] if isinstance(more, dict) else more
            if declared is None:
                ids = _read_json(self.directory / "added_tokens.json").items()
                declared = {i: {"content": text, "special": text in special} for text, i in ids if text not in tokens}
            found = {int(i): tokenizers.AddedToken(**declared[i]) for i in sorted(declared, key=int)}
            # Where another token has the id, it was renamed in tokenizer.json only.
            found = {i: token for i, token in found.items() if backend.id_to_token(i) in {None, token.content}}
            tokens.update({token.content: token for token in found.values()})
            for text in [*special, *filter(None, map(_special_text, more))]:
                token = tokens.setdefault(text, tokenizers.AddedToken(text, special=True))
                token.special = token.special or text in special
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise InvalidCheckpoint(f"{self.directory}: the added tokens are not readable: {error}") from error
        backend.add_tokens(list(tokens.values()))
        for i, token in found.items():
            if backend.token_to_id(token.content) != i:
                raise InvalidCheckpoint(
                    f"{self.directory}: the added token {token.content!r} has the id {i}, but tokenizer.json gives it "
                    f"{backend.token_to_id(token.content)}: use the files of one version of the model."
                )

    @property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens. The vocabulary of the model may be padded beyond it."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Return the tokens of a prompt, with the begin token if the post-processor of the file adds it.

        As in transformers 5, `add_bos_token` has no effect with a `tokenizer.json`, which defines the added tokens.
        A rendered chat already has all special tokens. Other threads run meanwhile.
        """
        # `encode` keeps the interpreter lock, for seconds if the text is long. A batch releases it, and a fast batch
        # leaves out the positions in the text, which take half of the time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=not is_chat)
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds to the text, for streaming."""
        return TokenBytes(self._backend)

    def _eos_ids(self) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            file = self.directory / name
            ids.update(_token_ids(_read_json(file).get("eos_token_id"), str(file)))
        if text := self.special_tokens.get("eos_token"):
            ids.update(_token_ids(self._backend.token_to_id(text), "eos_token"))
        return frozenset(ids)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The chat template: the file, else that of the configuration, which is a text or a list with names."""
        file = self.directory / "chat_template.jinja"
        if file.is_file():
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), self.special_tokens, self._join)
        found = self._config.get("chat_template")
        if isinstance(found, list):
            found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
        if not isinstance(found, str):
            return None
        return ChatTemplate(found, str(self.directory / "tokenizer_config.json"), self.special_tokens, self._join)

    def render_chat(self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, object] | None = None) -> str:
        """Return the text of a prompt that asks for the assistant's next message.

        `options` are further arguments of the template.

        Raises:
            InvalidChat: the checkpoint has no template, or the template cannot render the messages as Unicode.
        """
        if self._template is None:
            raise InvalidChat(
                f"The model in {self.directory} has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json): use /v1/completions, or add the template that the model was trained with."
            )
        return self._template.render(messages, options or {})


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise InvalidCheckpoint(
            f"{file.parent} has no {file.name}: a checkpoint directory needs config.json, *.safetensors and "
            "tokenizer.json. Save the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise InvalidCheckpoint(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one text need no thread on each CPU
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> Mapping[str, Any]:
    """Return the JSON object of a file; an empty one if the file does not exist."""
    return read_json(file) if file.exists() else {}


def _token_ids(value: object, where: str) -> list[int]:
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [token for token in given if isinstance(token, int) and not isinstance(token, bool)]
    if len(ids) != len(given):
        raise InvalidCheckpoint(f"{where}: {value!r} is not a token id or a list of them.")
    return ids


def _special_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
