from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.fairness.ledger import Ledger
from ballast_policy.fairness.order import ranked, ranking
from ballast_policy.request import Request, RequestClass

items = st.builds(
    Request,
    seq=st.integers(0, 10_000),
    request_class=st.just(RequestClass.OFFLINE),
    arrival=st.just(0.0),
    num_prompt=st.just(1),
    max_output=st.just(1),
    tenant=st.sampled_from("abcd"),
    priority=st.integers(-1, 1),
    slack=st.sampled_from([inf, -1.0, 2.5]),
    prefix_seq=st.integers(0, 2),
)


@given(st.lists(items, unique_by=lambda item: item.seq), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)))
def test_sorting_part_by_part_is_sorting_by_rank(requests: list[Request], service: dict[str, int]):
    ledger = Ledger()
    for tenant, cost in service.items():
        ledger.charge(tenant, cost)

    assert ranked(requests, ledger) == sorted(requests, key=ranking(ledger))
