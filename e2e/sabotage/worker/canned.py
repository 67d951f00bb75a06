"""Every answer is the same text, with as many tokens as were asked for."""

from ballast_engine.detokenizer import Detokenizer

Detokenizer.add = lambda self, token_ids: "ahoy " * len(list(token_ids))
Detokenizer.end = lambda self: ""
