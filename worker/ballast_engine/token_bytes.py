"""The bytes that each token of a vocabulary adds to the text."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Return the characters that byte-level BPE uses for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """Bytes by token id. Special tokens and unknown ids have no bytes.

    Two kinds of vocabulary are read directly: byte-level BPE, and SentencePiece (blanks as U+2581, bytes as `<0xNN>`),
    in which the first token of a text loses its leading blank. Any other decoder decodes each token alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        decoder = _decoder_of(backend)
        kinds = {part.get("type") for part in decoder}
        self._alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._is_sentencepiece = self._alphabet is None and bool(kinds & {"ByteFallback", "Metaspace"})
        self.strips_first_blank = self._is_sentencepiece and any(
            (part["type"] == "Strip" and part.get("start")) or _strips_metaspace(part) for part in decoder
        )
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        """Compute the bytes of a token at its first use."""
        piece = self[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if self._alphabet is not None:
            found = [self._alphabet.get(character) for character in token]
            known = bytes(byte for byte in found if byte is not None)
            return known if len(known) == len(found) else token.encode()
        if self._is_sentencepiece:
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            return token.replace("\u2581", " ").encode()
        return self._backend.decode([token_id]).encode()


def _decoder_of(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the parts of the decoder, from the description of the tokenizer without its vocabulary."""
    if backend.decoder is None:
        return []
    found: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    parts: list[dict[str, Any]] = found["decoders"] if found["type"] == "Sequence" else [found]
    return parts


def _strips_metaspace(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
