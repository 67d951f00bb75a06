"""The sampling parameters that a model suggests in its `generation_config.json`, for requests that leave them out."""

from __future__ import annotations

from pathlib import Path

from ballast_engine.models.config import read_json
from ballast_log import Log
from ballast_openai.body import COMPLETIONS_URL, parse_body
from ballast_openai.errors import InvalidBody

log = Log(__name__)

_SUPPORTED = ("temperature", "top_p", "top_k", "min_p")
_IGNORED = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "max_new_tokens": None}
"""Other parameters that vLLM takes from the file, and the values that change nothing."""


def suggested_sampling(file: Path) -> dict[str, float]:
    """Return the parameters that are in the file. Log them, and those that the native engine cannot apply."""
    found = {name: value for name, value in (read_json(file) if file.exists() else {}).items() if value is not None}
    ignored = {name: found[name] for name, neutral in _IGNORED.items() if found.get(name, neutral) != neutral}
    applied: dict[str, float] = {}
    for name in _SUPPORTED:
        if name in found:
            try:
                body = parse_body(COMPLETIONS_URL, {"model": "-", "prompt": "-", name: found[name]})
            except InvalidBody:  # no request could have this value
                ignored[name] = found[name]
            else:
                applied[name] = getattr(body, name)
    if applied:
        log.info("sampling parameters of generation_config.json are in force", **applied)
    if ignored:
        log.warning("sampling parameters of generation_config.json are ignored", **ignored)
    return applied
