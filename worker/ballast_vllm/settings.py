"""The policy configuration in EngineCore: where it comes from, and how a utility call changes it.

With the middleware, the API server sends every hot field at its start, from `BALLAST_CONFIG`, the variables and their
defaults. It refuses `additional_config["ballast"]`, which it would overwrite.

For a scheduler without the middleware, such as that of `vllm.LLM`, each field comes from the first of these places:

1. `additional_config["ballast"]`: fields of `PolicyConfig`, as below.
2. A worker configuration file (`WorkerConfig`), named by `{"ballast": {"config": PATH}}` or by the variable
   `BALLAST_CONFIG`.
3. The defaults of `PolicyConfig`, with vLLM's `max_num_seqs` as the slots.

A message names fields of `PolicyConfig`. Times are in seconds, shares are fractions, and null stands for "no limit".
`tenants` maps names to the fields of `TenantShare`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from sys import maxsize
from typing import Any

from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_policy.step.budget import ONLINE_CHUNKS
from ballast_vllm import configuration
from ballast_vllm.configuration import FILE_VARIABLE
from ballast_worker.settings import policy_config

KEY = "ballast"

FIXED = frozenset({"num_blocks", "block_tokens", "can_suspend", "most_residents", "is_encoder", "expert_share"})
"""Fields that follow from vLLM, so that no message may name them."""
HOT = frozenset(field.name for field in fields(PolicyConfig)) - FIXED
"""Fields that a message may name."""
UNLIMITED = ("ttft", "tpot")
WHOLE = frozenset({"slots", "chunk_tokens", "tail_tokens"})
SHARES = frozenset({"offline_share", "offline_max_share", "objective", "watermark"})
LEAST_CHUNK = 16


class InvalidSettings(ValueError):
    """A message that names an unknown field or has a wrong value."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The sizes that vLLM fixes at its start."""

    max_num_seqs: int
    max_step_tokens: int
    """Most tokens of a step."""
    num_draft_tokens: int = 0
    """Most draft tokens of a decode."""
    most_residents: int = maxsize
    """Most running and parked requests."""
    is_encoder: bool = False
    """Whether the model returns vectors or scores. Only its SLO limits a step, so a chunk is a whole step."""

    def fit(self, config: PolicyConfig) -> PolicyConfig:
        """Return the configuration with slots and chunk that vLLM can carry out in one step."""
        slots = max(1, min(config.slots, self.max_num_seqs))
        if self.is_encoder:
            return replace(config, slots=slots, chunk_tokens=self.max_step_tokens, tpot=inf, is_encoder=True)
        left = self.max_step_tokens - self._decodes(slots)
        chunk = max(1, min(config.chunk_tokens, max(LEAST_CHUNK, left // ONLINE_CHUNKS)))
        if (slots, chunk) == (config.slots, config.chunk_tokens):
            return config
        return replace(config, slots=slots, chunk_tokens=chunk)

    def most_filled(self, chunk_tokens: int) -> int:
        """Return the most tokens that the policy puts into a step of a model that generates text."""
        return ONLINE_CHUNKS * chunk_tokens + self._decodes(self.max_num_seqs)

    def _decodes(self, slots: int) -> int:
        return slots * (1 + self.num_draft_tokens)


def initial(
    additional: Any, limits: StepLimits, *, num_blocks: int, block_tokens: int, expert_share: float = 0.0
) -> PolicyConfig:
    """Return the configuration at the start of EngineCore. `additional` is vLLM's `additional_config`."""
    stated = stated_in(additional)
    config = PolicyConfig(
        slots=limits.max_num_seqs,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        chunk_tokens=limits.max_step_tokens,
        can_suspend=False,
        most_residents=limits.most_residents,
        expert_share=expert_share,
    )
    path = stated.pop("config", None) or os.environ.get(FILE_VARIABLE)
    if path:
        file = configuration.load(Path(path))
        config = policy_config(file, config)
        if file.slots is not None:
            config = replace(config, slots=file.slots)
    return limits.fit(changed(config, stated))


def stated_in(additional: Any) -> dict[str, Any]:
    """Return Ballast's part of vLLM's `additional_config`."""
    return dict((additional.get(KEY) if isinstance(additional, Mapping) else None) or {})


def changed(config: PolicyConfig, message: Mapping[str, Any]) -> PolicyConfig:
    """Return the configuration with the fields of a message.

    Raises:
        InvalidSettings: the message names an unknown field or has a wrong value.
    """
    unknown = sorted(message.keys() - HOT)
    if unknown:
        raise InvalidSettings(f"unknown field {unknown[0]!r}: expected {', '.join(sorted(HOT))}")
    found: dict[str, Any] = dict(message)
    for name in UNLIMITED:
        if name in found and found[name] is None:
            found[name] = inf
    for name, value in found.items():
        if name == "tenants":
            continue
        if value is None and name == "max_interference":
            continue
        is_whole = name in WHOLE
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float) or not value >= 0:
            kind = "whole number" if is_whole else "number"
            raise InvalidSettings(f"{name} is {value!r}: expected a {kind} of at least 0")
        if name in SHARES and value > 1:
            raise InvalidSettings(f"{name} is {value!r}: expected a fraction of at most 1, for example 0.1 for 10 %")
    if "tenants" in found:
        found["tenants"] = _tenants(found["tenants"])
    return replace(config, **found)


def message_of(config: PolicyConfig) -> dict[str, Any]:
    """Return the message that sets every hot field of a configuration."""
    message = {field.name: getattr(config, field.name) for field in fields(config) if field.name in HOT}
    for name in UNLIMITED:
        if message[name] == inf:
            message[name] = None
    message["tenants"] = {name: asdict(share) for name, share in config.tenants.items()}
    return message


def _tenants(found: Any) -> dict[str, TenantShare]:
    try:
        return {str(name): TenantShare(**share) for name, share in found.items()}
    except (AttributeError, TypeError) as error:
        raise InvalidSettings(f"tenants: {error}") from error
