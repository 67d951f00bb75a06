"""The arguments of `vllm serve` that `engine.vllm.args` must not contain, because a field of Ballast decides them.

Each group has one rule with its own sentence, for the API server and for Python. An abbreviation of a name passes the
rules. The process of the pod finds it, because it asks vLLM's parser what the arguments change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ballast_api.rules import Rule

Argument = Annotated[str, Field(min_length=1, max_length=2048)]


@dataclass(frozen=True, slots=True)
class OwnedArguments:
    """Arguments that one sentence refuses.

    Attributes:
        names: Long names without dashes. A name that ends with `*` stands for all names with that prefix.
        short: Short names without the dash.
        sentence: What decides these arguments, and what to do.
        has_no_effect: Whether the arguments change nothing in a worker. So a stored resource may keep them, and its
            workers do not get them.
    """

    names: tuple[str, ...]
    short: tuple[str, ...]
    sentence: str
    has_no_effect: bool = False

    @property
    def pattern(self) -> str:
        """Return the regular expression of an argument of this group, for both Python and CEL (RE2)."""
        names = "|".join(name.replace("-", "[-_]").replace("*", "[-_a-z]*") for name in self.names)
        short = f"|-({'|'.join(self.short)})" if self.short else ""
        return f"^(--(no[-_])?({names}){short})([.=+\\n]|$)"

    def matches(self, argument: str) -> bool:
        """Return whether an argument belongs to the group."""
        return re.match(self.pattern, argument) is not None

    def has_name(self, name: str) -> bool:
        """Return whether a long name without dashes belongs to the group."""
        return self.matches(f"--{name}")

    def rule(self) -> Rule:
        """Return the rule that refuses the arguments of the group in `args`."""
        return Rule(
            f"!has(self.args) || self.args.all(arg, !arg.matches('{self.pattern}'))",
            self._holds,
            f"engine.vllm.args: {self.sentence}",
            stored=("args",) if self.has_no_effect else (),
        )

    def _holds(self, settings: Any) -> bool:
        return not any(self.matches(argument) for argument in settings.args)


OWNED = (
    OwnedArguments(
        ("model", "served-model-name", "dtype", "max-model-len", "enable-lora", "lora-modules", "max-lora-rank"),
        (),
        "the section model decides model, served-model-name, dtype, max-model-len, enable-lora, lora-modules and "
        "max-lora-rank. Remove the argument, and set model.servedName, model.aliases, model.adapters or another field "
        "of the section",
    ),
    OwnedArguments(
        ("revision", "download-dir", "hf-token"),
        (),
        "the section model decides revision, download-dir and hf-token. Remove the argument, and set model.revision, "
        "model.cache or model.credentialsSecret. vLLM reads the model from a directory, so the argument would have no "
        "effect on its files",
        has_no_effect=True,
    ),
    OwnedArguments(
        ("quantization", "kv-cache-dtype", "speculative-config", "spec-method", "spec-model", "spec-tokens",
         "kv-cache-memory-bytes", "enable-prefix-caching", "max-num-seqs"),
        ("q", "sc"),
        "fields of the resource decide quantization, kv-cache-dtype, speculative-config, kv-cache-memory-bytes, "
        "enable-prefix-caching and max-num-seqs. Remove the argument, and set engine.quantization, engine.kvDtype, "
        "engine.speculative, engine.kvMemoryMebibytes, engine.prefixCache or slots",
    ),
    OwnedArguments(
        ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-*", "prefill-context-parallel-size",
         "decode-context-parallel-size", "distributed-executor-backend", "device-ids", "nnodes", "node-rank",
         "master-addr", "master-port"),
        ("tp", "pp", "dp", "dpn", "dpr", "dpl", "dpa", "dpp", "dpb", "dph", "dpe", "dpm", "pcp", "dcp", "n", "r"),
        "gpu.count decides the parallelism: the GPUs of a worker share the model by tensor parallelism. Remove the "
        "argument, and set gpu.count or replicas",
    ),
    OwnedArguments(
        ("api-key", "ssl-*", "enable-ssl-refresh"),
        (),
        "fields of the resource decide api-key, ssl-* and enable-ssl-refresh. Remove the argument, and set apiKeys or "
        "network.tlsSecret (in the file of a worker: runtime.apiKeysFile, or runtime.tlsCertFile and "
        "runtime.tlsKeyFile). Without these fields, any client may connect, over plain HTTP",
    ),
    OwnedArguments(
        ("host", "port", "uds", "root-path", "middleware", "scheduler-cls", "scheduling-policy",
         "additional-config", "shutdown-timeout", "logging-config", "log-config-file", "config",
         "disable-access-log-for-endpoints"),
        (),
        "Ballast sets host, port, uds, root-path, middleware, scheduler-cls, scheduling-policy, additional-config, "
        "shutdown-timeout, logging-config, log-config-file, config and disable-access-log-for-endpoints itself. Remove "
        "the argument",
    ),
    OwnedArguments(
        ("headless", "grpc", "api-server-count", "kv-transfer-config", "ec-transfer-config", "kv-offloading-size",
         "max-num-active-seqs", "long-prefill-token-threshold", "prefill-schedule-interval", "watermark"),
        ("asc",),
        "Ballast does not support headless, grpc, api-server-count, kv-transfer-config, ec-transfer-config, "
        "kv-offloading-size, max-num-active-seqs, long-prefill-token-threshold, prefill-schedule-interval and "
        "watermark. Remove the argument",
    ),
)  # fmt: skip
"""All groups."""


def without_effect(arguments: Sequence[str]) -> str | None:
    """Return the sentence about the arguments of a stored resource that change nothing, or None without any.

    It names them without their values: one of them is a token.
    """
    for group in OWNED:
        found = [match[1] for each in arguments if group.has_no_effect and (match := re.match(group.pattern, each))]
        if found:
            return f"engine.vllm.args has {', '.join(dict.fromkeys(found))}: {group.sentence}"
    return None


def with_effect(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a stored resource without those that change nothing, and without the values of these."""
    kept, may_be_value = list[str](), False
    for argument in arguments:
        if without_effect([argument]):
            may_be_value = "=" not in argument
            continue
        if not may_be_value or argument.startswith("-"):
            kept.append(argument)
        may_be_value = False
    return tuple(kept)


def refusal(names: Sequence[str]) -> str | None:
    """Return the sentence that refuses the first owned one of these long names, or None if none is owned."""
    for name in names:
        for group in OWNED:
            if group.has_name(name):
                return f"--{name}: {group.sentence}"
    return None
