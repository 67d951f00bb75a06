"""The place of a request travels in its parameters, and nothing in them can stop EngineCore."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from ballast_policy.request import OFFLINE, ONLINE
from ballast_vllm.requests import RequestPlace, place_of

STATED = RequestPlace(
    request_class=OFFLINE, tenant="a", priority=-3, ttft=1.5, tpot=0.1, slack=60.0, prefix_key=7, num_computed=12
)


@pytest.mark.parametrize("place", [RequestPlace(), STATED], ids=["defaults", "all fields"])
@pytest.mark.parametrize("field", ["extra_args", "extra_kwargs"], ids=["sampling", "pooling"])
def test_a_place_is_read_as_it_was_written(place, field):
    assert place_of(SimpleNamespace(**{field: {"ballast": place.message()}})) == place


@pytest.mark.parametrize(
    "found",
    [None, 3, [], '{"class": "offline"}', {"class": 4}, {"class": "batch", "priority": "high", "tenant": 3},
     {"ttft": -1}, {"ttft": float("nan")}, {"slack": "soon"}, {"priority": True}, {"priority": 2**70}, {"tenant": ""},
     {"num_computed": -5}, {"prefix_key": 1.5}, {"slack": 10**400}],
)  # fmt: skip
def test_malformed_values_count_as_absent(found):
    assert place_of(SimpleNamespace(extra_args={"ballast": found})) == RequestPlace()


@pytest.mark.parametrize(
    "params", [SimpleNamespace(), SimpleNamespace(extra_args=None), None, SimpleNamespace(extra_args=3)]
)
def test_a_request_without_a_place_is_online(params):
    place = place_of(params)

    assert (place.request_class, place.tenant, place.slack) == (ONLINE, "default", inf)
