"""Turn tokens into text as they arrive: whole characters only, and no text that a stop string may still remove.

The text does not depend on how its tokens are grouped into calls. A streamed answer, an answer detokenized at its end,
and an answer that another worker continued are therefore equal. With byte-level BPE the text equals `Tokenizer.decode`
of all tokens. With SentencePiece it differs in two points: a continuation keeps its leading blank, and of byte tokens
that are no valid UTF-8 only the wrong bytes are replaced.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence

from ballast_engine.token_bytes import TokenBytes

_Utf8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer."""

    def __init__(
        self, pieces: TokenBytes, *, prompt: Sequence[int] = (), stop: Sequence[str] = (), keep_stop: bool = False
    ) -> None:
        """Start after a prompt.

        Args:
            pieces: the bytes of each token
            prompt: the tokens before the answer; they decide whether a leading blank belongs to the answer
            stop: texts that end the answer; none may be empty
            keep_stop: keep the stop string in the text
        """
        self.is_stopped = False
        """Whether a stop string is complete. No more text follows."""
        self._pieces = pieces
        self._utf8 = _Utf8(errors="replace")
        self.has_stop = bool(stop)
        self._stop, self._overlaps = tuple(stop), [0] * len(stop)
        self._keep_stop = keep_stop
        self._held = ""
        self._strips_blank = pieces.strips_first_blank and not any(pieces[token] for token in prompt)

    def add(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that is final now."""
        if self.is_stopped:
            return ""
        pieces = self._pieces
        return self._settle(self._utf8.decode(b"".join([pieces[token] for token in token_ids])))

    def end(self) -> str:
        """Return the text that was held back. Bytes that form no character are replaced."""
        if self.is_stopped:
            return ""
        rest = self._settle(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return rest if self.is_stopped else rest + held

    def _settle(self, text: str) -> str:
        if self._strips_blank and text:
            self._strips_blank = False
            text = text.removeprefix(" ")
        if not self.has_stop or not text:
            return text
        added, text = len(text), self._held + text
        # The first complete stop string counts, so that the cut does not depend on how tokens are grouped.
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            end, begin = min(ends)
            self.is_stopped = True
            self._held = ""
            return text[:end] if self._keep_stop else text[:begin]
        # An overlap grows by no more than the new text, so a long stop string that does not match costs nothing.
        self._overlaps = [_overlap(text, stop, n + added) for stop, n in zip(self._stop, self._overlaps, strict=True)]
        keep = max(self._overlaps)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str, most: int) -> int:
    """Return the length of the longest end of `text`, at most `most`, that `stop` starts with."""
    for length in range(min(len(stop) - 1, most), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
