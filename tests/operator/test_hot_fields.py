"""One mark decides for each field: a running worker applies a change of it, or the operator rolls the pods."""

from __future__ import annotations

from typing import Any

import pytest
from every_field import BY_OWN_REDIS, BY_RAY, REFUSED, SPEC, changed, everything
from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from resources import make_resource

from ballast_api import structural
from ballast_api.base import ApiModel
from ballast_api.hot import Hot, changed_fields, with_hot_fields
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.worker_config import WorkerConfig
from ballast_operator.children.config import version_of, worker_config
from ballast_operator.children.pods import deployment
from ballast_worker.reload import Loaded, reloaded

HOT_FIELDS = {
    "engine.prefillChunkTokens",
    *(f"slo.{name}" for name in ("ttftMilliseconds", "tpotMilliseconds", "latencyMilliseconds", "objectivePercent")),
    *(f"offline.{name}" for name in ("reservedPercent", "maxPercent", "maxInterferencePercent", "tenants")),
    *(f"offline.{name}" for name in ("batchWindowMilliseconds", "maxAttempts", "leaseSeconds")),
    *("offline.resultsDays", "offline.abandonedDays"),
    *(f"limits.{name}" for name in ("maxQueuedRequests", "maxQueueMilliseconds", "maxBodyKibibytes")),
    "cost.dollarsPerGpuHour",
    *(f"runtime.{name}" for name in ("generation", "created", "unreadySeconds", "drainSeconds")),
}
"""Written out here, so that a test fails if a mark is lost or added by mistake."""
BASE = WorkerConfig.parse("model: {uri: /m}", "test")
RESOURCE = make_resource()


def leaves(model: BaseModel, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        found += leaves(value, (*path, name)) if isinstance(value, BaseModel) else [(*path, name)]
    return found


def replaced(model: Any, path: tuple[str, ...]) -> Any:
    """Return the model with another value in one field."""
    name, rest = path[0], path[1:]
    value = getattr(model, name)
    return model.model_copy(update={name: replaced(value, rest) if rest else another(value)})


def another(value: object) -> object:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case _:
            return 7


def pod_template(config: WorkerConfig, resource: InferenceDeployment = RESOURCE) -> Any:
    manifest = deployment(resource, version_of(config), image="worker:1", own_keys=frozenset())
    return manifest["spec"]["template"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the other value need not be of the right type
@pytest.mark.parametrize("path", leaves(BASE), ids=".".join)
def test_a_hot_field_is_reloaded_and_any_other_field_rolls_the_pods(path: tuple[str, ...]) -> None:
    wanted = replaced(BASE, path)
    name = ".".join(map(to_camel, path))

    is_hot = name in HOT_FIELDS
    reloads = reloaded(Loaded(BASE, "before"), wanted, "after") == Loaded(wanted, "after")
    waits = reloaded(Loaded(BASE, "before"), wanted, "after") == Loaded(BASE, "before", (name,))
    rolls = pod_template(wanted) != pod_template(BASE)

    assert (reloads, waits) == (is_hot, not is_hot), (
        f"{name} is in HOT_FIELDS or marked `Hot` in ballast_api, and not both. A running worker applies a hot field"
    )
    in_grace_period = name == "runtime.unreadySeconds"
    assert rolls is (in_grace_period or not is_hot), (
        f"{name}: a hot field rolls no pod, and any other field rolls the pods"
    )


def test_every_hot_field_exists() -> None:
    assert {".".join(map(to_camel, path)) for path in leaves(BASE)} >= HOT_FIELDS


ROLLING = ("model", "engine", "gpu", "slots", "offline", "redis", "apiKeys", "template")
ROLLING_FIELDS = {"rollout.unreadySeconds", "rollout.drainSeconds", "rollout.startupSeconds", "network.tlsSecret"}
"""Sections and fields of the resource that roll the pods unless they are hot, as the reference page states."""


@pytest.mark.parametrize("leaf", sorted(set(structural.leaves(SPEC)) - set(REFUSED) - BY_OWN_REDIS - BY_RAY))
def test_a_field_of_the_resource_rolls_the_pods_unless_it_is_hot(leaf: str) -> None:
    templates = []
    for spec in changed(everything(), leaf, SPEC):
        resource = make_resource(**spec)
        templates.append(pod_template(worker_config(resource, own_keys=frozenset()), resource))
    is_hot = leaf in HOT_FIELDS or leaf.startswith("offline.tenants")
    rolls = not is_hot and (leaf.partition(".")[0] in ROLLING or leaf in ROLLING_FIELDS)

    is_rolled = templates[0] != templates[1]

    assert is_rolled == rolls, (
        f"{leaf}: mark it `Hot` in ballast_api and add it to HOT_FIELDS if a running worker applies it. If it rolls "
        "the pods, it is in ROLLING or ROLLING_FIELDS, and `resource` in docs/generate.py states so"
    )


class Inner(ApiModel):
    marked: Hot[int] = 1
    unmarked: int = 1


class Outer(ApiModel):
    inner: Inner = Inner()
    whole: Hot[Inner] = Inner()


def test_a_mark_is_all_that_a_hot_field_needs() -> None:
    wanted = Outer(inner=Inner(marked=2, unmarked=2), whole=Inner(marked=2, unmarked=2))

    merged = with_hot_fields(Outer(), wanted)

    assert merged == Outer(inner=Inner(marked=2), whole=Inner(marked=2, unmarked=2))
    assert list(changed_fields(merged, wanted)) == ["inner.unmarked"]
