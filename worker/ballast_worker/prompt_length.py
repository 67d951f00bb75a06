"""The most bytes of text that one token can stand for, from the tokenizer of a checkpoint.

A text with more bytes than the tokens of the context can stand for is refused before it is tokenized. That is exact
only if the tokenizer drops nothing: no normalizer that shortens text, every byte in the vocabulary, and no token that
takes in the blanks around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ballast_engine.token_bytes import byte_level_alphabet

MOST_NFC_RATIO = 4
"""Composing characters (NFC) makes UTF-8 at most three times shorter."""


def longest_token_bytes(file: Path) -> int | None:
    """Return the most bytes of text in one token; None if the tokenizer may drop text."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    model = found.get("model") or {}
    added: list[dict[str, Any]] = found.get("added_tokens") or []
    if model.get("type") != "BPE" or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    vocabulary: Iterable[str] = model.get("vocab") or {}
    steps = [_type_of(step) for step in _steps(found.get("pre_tokenizer"), "pretokenizers")]
    ratio = _normalizer_ratio(found.get("normalizer"))
    if "ByteLevel" in steps and byte_level_alphabet().keys() <= set(vocabulary):
        longest = max(map(len, vocabulary))  # one character for each byte
    elif model.get("byte_fallback") and {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocabulary):
        longest = max(len(token.encode()) for token in vocabulary)
    else:
        return None
    if ratio is None or not set(steps) <= {"ByteLevel", "Split", "Digits"}:
        return None
    if any(step.get("behavior") == "Removed" for step in _steps(found.get("pre_tokenizer"), "pretokenizers")):
        return None
    return ratio * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _normalizer_ratio(normalizer: dict[str, Any] | None) -> int | None:
    """Return how many times shorter the normalizer may make a text; None if there is no limit."""
    ratio = 1
    for step in _steps(normalizer, "normalizers"):
        kind = _type_of(step)
        if kind == "NFC":
            ratio *= MOST_NFC_RATIO
        elif kind == "Replace":
            pattern = (step.get("pattern") or {}).get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif kind != "Prepend":
            return None
    return ratio


def _steps(value: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a pipeline of the tokenizer, which is one step, a sequence, or nothing."""
    if value is None:
        return []
    return [step for part in value[name] for step in _steps(part, name)] if _type_of(value) == "Sequence" else [value]


def _type_of(step: dict[str, Any]) -> str:
    return str(step.get("type"))
