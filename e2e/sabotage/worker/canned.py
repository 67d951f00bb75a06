"""Answer every request with the same text, of the requested number of tokens."""

from ballast_engine.detokenizer import Detokenizer

Detokenizer.add = lambda self, token_ids: "ahoy " * len(list(token_ids))
Detokenizer.end = lambda self: ""
