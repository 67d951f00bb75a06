"""Tokens to text while they come: never half a character, and nothing that a stop string may still take back.

A text does not depend on how its tokens were grouped into calls, so a streamed answer, one detokenized at its end and
one that another worker went on with are equal. With byte-level BPE it equals `Tokenizer.decode` of all tokens.
SentencePiece differs in two points, for the better: a continuation keeps its leading blank, and where byte tokens form
no valid UTF-8 only the wrong bytes are replaced, not the whole run.
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
        """Begin behind `prompt`.

        Args:
            pieces: what each token contributes
            prompt: what stands before; decides whether a leading blank belongs to the answer
            stop: texts that end the answer; none may be empty
            keep_stop: leave the stop string in the text
        """
        self.is_stopped = False
        """A stop string is complete; nothing more is produced."""
        self._pieces = pieces
        self._utf8 = _Utf8(errors="replace")
        self.has_stop = bool(stop)
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._held = ""
        self._strips_blank = pieces.strips_first_blank and not any(pieces[token] for token in prompt)

    def add(self, token_ids: Iterable[int]) -> str:
        """Take tokens in and give out the text that is settled by them."""
        if self.is_stopped:
            return ""
        pieces = self._pieces
        return self._settle(self._utf8.decode(b"".join([pieces[token] for token in token_ids])))

    def end(self) -> str:
        """Give out what was held back; bytes that never became a character are replaced."""
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
        text = self._held + text
        # The stop string that is complete first counts, so that the cut does not depend on how tokens were grouped.
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            end, begin = min(ends)
            self.is_stopped = True
            self._held = ""
            return text[:end] if self._keep_stop else text[:begin]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
