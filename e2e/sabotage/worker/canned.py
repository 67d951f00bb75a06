"""Every answer is the same text, with the requested number of tokens."""

from ballast_engine.detokenizer import Detokenizer

Detokenizer.add = lambda self, token_ids: "ahoy " * len(list(token_ids))
Detokenizer.end = lambda self: ""
