"""An operator with a second resource type: a Greeting, whose child is a ConfigMap. Run it as a script."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

import ballast_log
from ballast_api.base import ApiModel
from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.errors import InvalidConfig
from ballast_api.metadata import Metadata
from ballast_api.names import INSTANCE_LABEL, MANAGED_BY_LABEL, NAME_LABEL, OPERATOR, SPEC_HASH
from ballast_api.replicas import Scaling
from ballast_api.status import Condition, ResourceStatus, ScalingStatus
from ballast_operator.children.manifest import hash_of
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import CONFIG_MAP, Body, Kind
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot, changes, deletions
from ballast_operator.poll_result import PollResult
from ballast_operator.process import RESOURCE_TYPES, run
from ballast_operator.resource_type import ConditionInput, ConditionValue, ResourceType
from ballast_operator.settings import OperatorSettings

GREETING = Kind("Greeting", "test.ballast.dev", "v1", "greetings")
LABEL = "greeting"
MOST_REPLICAS = 3


class GreetingSpec(ApiModel):
    text: str
    replicas: int = 1


class GreetingStatus(ResourceStatus):
    text: str = ""


class Greeting(ApiModel):
    api_version: str
    kind: str
    metadata: Metadata
    spec: GreetingSpec
    status: GreetingStatus = GreetingStatus()


def read(body: Body) -> Greeting:
    try:
        return Greeting.model_validate(body)
    except ValidationError as error:
        raise InvalidConfig("greeting", InvalidConfig.sentences(error)) from error


def plan(
    greeting: Greeting, snapshot: ClusterSnapshot, context: OperatorContext, poll: PollResult | None
) -> ChildrenPlan:
    assert poll is None, "a Greeting has no workers"
    about = greeting.metadata
    owner = {"apiVersion": GREETING.api_version, "kind": GREETING.name, "name": about.name, "uid": about.uid}
    data = {"text": greeting.spec.text, "image": context.image}
    body: Body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{about.name}-greeting",
            "namespace": about.namespace,
            "labels": {NAME_LABEL: LABEL, INSTANCE_LABEL: about.name, MANAGED_BY_LABEL: OPERATOR},
            "annotations": {SPEC_HASH: hash_of(data)},
            "ownerReferences": [owner],
        },
        "data": data,
    }
    wanted = [(CONFIG_MAP, body)]
    return ChildrenPlan(apply=changes(wanted, snapshot), delete=tuple(deletions(wanted, snapshot)))


def conditions(given: ConditionInput[Greeting]) -> Mapping[ConditionType, ConditionValue]:
    found = given.snapshot.child(CONFIG_MAP, given.resource.metadata, f"{given.resource.metadata.name}-greeting")
    if found is None:
        return {ConditionType.READY: ConditionValue("False", ConditionReason.STARTING, "the ConfigMap does not exist")}
    return {
        ConditionType.READY: ConditionValue(
            "True", ConditionReason.SERVING, f"the ConfigMap says {found['data']['text']}"
        )
    }


def status(
    given: ConditionInput[Greeting], reported: tuple[Condition, ...], scaling: ScalingStatus | None
) -> GreetingStatus:
    del scaling
    about = given.resource
    return GreetingStatus(observed_generation=about.metadata.generation, conditions=reported, text=about.spec.text)


RESOURCE_TYPE = ResourceType(
    kind=GREETING,
    children=(CONFIG_MAP,),
    label=LABEL,
    read=read,
    read_status=GreetingStatus.model_validate,
    plan=plan,
    conditions=conditions,
    status=status,
    scaling=lambda _: Scaling(max_replicas=MOST_REPLICAS),
)


def crd() -> Body:
    """The CustomResourceDefinition of a Greeting."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = anything | {"properties": {"replicas": {"type": "integer", "default": 1}}}
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    version: dict[str, Any] = {
        "name": GREETING.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": anything}}},
        "subresources": {"status": {}, "scale": scale},
    }
    names = {"kind": GREETING.name, "plural": GREETING.plural, "singular": "greeting", "listKind": "GreetingList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{GREETING.plural}.{GREETING.group}"},
        "spec": {"group": GREETING.group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


if __name__ == "__main__":
    ballast_log.configure("info", "text")
    sys.exit(asyncio.run(run(OperatorSettings.read(os.environ), (*RESOURCE_TYPES, RESOURCE_TYPE))))
