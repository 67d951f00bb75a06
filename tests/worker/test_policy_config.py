"""From the configuration file to what the policy is told."""

from __future__ import annotations

import pytest

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_worker.settings import policy_config

MINIMAL = "model: {uri: /models/m}\n"


def told(offline: str) -> PolicyConfig:
    config = WorkerConfig.parse(MINIMAL + "offline: " + offline, "here.yaml")
    return policy_config(config, PolicyConfig(slots=8, num_blocks=100))


def test_what_a_tenant_is_entitled_to_reaches_the_policy():
    config = told("{tenants: [{name: a, weight: 2, maxPriority: 3, maxSlots: 4, reservedPercent: 25}, {name: b}]}")

    assert config.tenants == {"a": TenantShare(2.0, 3, 4, 0.25), "b": TenantShare()}


def test_the_batch_window_reaches_the_policy_in_seconds():
    assert told("{batchWindowMilliseconds: 15}").batch_window == 0.015
    assert told("{}").batch_window == 0


def test_reservations_of_more_than_there_is_are_refused():
    with pytest.raises(InvalidConfig, match=r"reserve more than 100 % of the slots in total\. Lower a reservedPercent"):
        told("{tenants: [{name: a, reservedPercent: 60}, {name: b, reservedPercent: 50}]}")
