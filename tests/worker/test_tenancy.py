from __future__ import annotations

from pathlib import Path

import pytest

from ballast_api.sections import Tenant
from ballast_openai.body import parse_body
from ballast_policy.request import RequestClass
from ballast_worker.errors import NotServed, Refused
from ballast_worker.tenancy import ApiKeys, Tenancy

OPEN = Tenancy((), None)


def make_keys(tmp_path: Path, text: str) -> ApiKeys:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return ApiKeys.load(path)


def test_without_headers_a_request_is_online_at_priority_0_of_the_default_tenant() -> None:
    caller = OPEN.caller({})

    assert (caller.tenant, caller.request_class, caller.priority) == ("default", RequestClass.ONLINE, 0)
    assert caller.ttft_seconds is None
    assert caller.tpot_seconds is None


@pytest.mark.parametrize(
    ("tenant", "slo"),
    [
        ("x-ballast-tenant", "x-ballast-slo"),
        ("x-llm-d-inference-fairness-id", "x-llm-d-slo"),
        ("x-gateway-inference-fairness-id", "x-slo"),
    ],
)
@pytest.mark.parametrize("routers", [{}, {b"x-gateway-inference-fairness-id": b"team-a", b"x-slo-ttft-ms": b"250"}])
def test_headers_name_tenant_class_and_slo(tenant: str, slo: str, routers: dict[bytes, bytes]) -> None:
    headers = {
        **routers,
        tenant.encode(): b"team-a",
        b"x-ballast-class": b"Offline",
        f"{slo}-ttft-ms".encode(): b"250",
        f"{slo}-tpot-ms".encode(): b"12.5",
    }

    caller = OPEN.caller(headers)

    assert caller.tenant == "team-a"
    assert caller.request_class is RequestClass.OFFLINE
    assert caller.ttft_seconds == 0.25
    assert caller.tpot_seconds == 0.0125


@pytest.mark.parametrize("name", [b"x-ballast-tenant", b"x-ballast-slo-ttft-ms", b"x-ballast-slo-tpot-ms"])
def test_a_client_cannot_override_the_header_that_a_gateway_sets(name: bytes) -> None:
    of_gateway = {b"x-llm-d-inference-fairness-id": b"a", b"x-llm-d-slo-ttft-ms": b"900", b"x-slo-tpot-ms": b"90"}

    with pytest.raises(Refused, match="send one of them") as caught:
        OPEN.caller({**of_gateway, name: b"1"})

    assert (caught.value.status, caught.value.code) == (400, "conflicting_headers")
    assert "90" not in str(caught.value), "the client does not learn the value of the gateway"


def test_headers_with_equal_numbers_do_not_differ() -> None:
    headers = {b"x-ballast-slo-ttft-ms": b"500", b"x-llm-d-slo-ttft-ms": b"500.0", b"x-slo-ttft-ms": b"5e2"}

    assert OPEN.caller(headers).ttft_seconds == 0.5
    with pytest.raises(Refused, match="send one of them"):
        OPEN.caller(headers | {b"x-slo-ttft-ms": b"soon"})


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        pytest.param(None, None, 0, id="neither"),
        pytest.param(None, -5, 5, id="the body's lower is our higher"),
        pytest.param(None, 3, -3, id="the body's higher is sheddable"),
        pytest.param(b"7", 3, 7, id="the header beats the body"),
        pytest.param(b"-2", -9, -2, id="a negative header too"),
    ],
)
def test_priority_has_one_polarity_inside(header: bytes | None, body: int | None, priority: int) -> None:
    headers = {} if header is None else {b"x-ballast-priority": header}
    data = {"model": "m", "prompt": "p", "priority": body}

    assert OPEN.caller(headers, parse_body("/v1/completions", data).band).priority == priority


@pytest.mark.parametrize(("headers", "is_flex"), [({b"x-ballast-class": b"offline"}, False), ({}, True)])
def test_a_deployment_without_offline_slots_refuses_offline_requests_by_name(headers, is_flex) -> None:
    tenancy = Tenancy((), None, serves_offline=False)

    tenancy.check_offline(tenancy.caller({}))
    with pytest.raises(Refused, match=r"offline\.maxPercent is 0") as caught:
        tenancy.check_offline(tenancy.caller(headers, is_flex=is_flex))
    assert (caught.value.status, caught.value.code) == (503, "no_offline")


def test_a_tenants_priority_is_taken_down_to_its_band() -> None:
    tenancy = Tenancy((Tenant(name="a", max_priority=2),), None)

    caller = tenancy.caller({b"x-llm-d-inference-fairness-id": b"a", b"x-ballast-priority": b"50"})

    assert caller.priority == 2


@pytest.mark.parametrize("tenants", [(), (Tenant(name="team-a"),)], ids=["no tenant is declared", "no maximum is set"])
@pytest.mark.parametrize(("asked", "priority"), [(b"1", 0), (b"-3", -3)])
def test_with_api_keys_a_priority_above_0_must_be_granted(tmp_path: Path, tenants, asked, priority) -> None:
    tenancy = Tenancy(tenants, make_keys(tmp_path, "sk-1: team-a"))
    headers = {b"authorization": b"Bearer sk-1"}

    assert tenancy.caller({**headers, b"x-ballast-priority": asked}).priority == priority
    assert tenancy.caller(headers, int(asked)).priority == priority, "the priority of a body"


@pytest.mark.parametrize("authorization", [b"Bearer 22", b"bearer  22 "])
def test_an_api_key_beats_the_header(tmp_path: Path, authorization: bytes) -> None:
    tenancy = Tenancy((), make_keys(tmp_path, "sk-1: team-a\n'22 ': team-b\n"))
    headers = {b"authorization": authorization, b"x-llm-d-inference-fairness-id": b"team-a"}

    assert tenancy.caller(headers).tenant == "team-b"


@pytest.mark.parametrize("authorization", [None, b"", b"Bearer ", b"Bearer wrong", b"Basic sk-1", b"sk-1"])
def test_without_a_known_key_a_request_gets_401(tmp_path: Path, authorization: bytes | None) -> None:
    tenancy = Tenancy((), make_keys(tmp_path, "sk-1: team-a"))
    headers = {} if authorization is None else {b"authorization": authorization}

    with pytest.raises(Refused) as caught:
        tenancy.caller(headers)

    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers == {"www-authenticate": "Bearer"}


@pytest.mark.parametrize("name", [b"", b"stranger"])
def test_where_tenants_are_declared_all_others_get_403(name: bytes) -> None:
    tenancy = Tenancy((Tenant(name="a"),), None)

    with pytest.raises(Refused) as caught:
        tenancy.caller({b"x-llm-d-inference-fairness-id": name})

    assert (caught.value.status, caught.value.code) == (403, "unknown_tenant")
    assert "in the header x-ballast-tenant" in caught.value.message


def test_who_is_named_by_an_api_key_is_not_told_of_a_header(tmp_path: Path) -> None:
    tenancy = Tenancy((Tenant(name="a"),), make_keys(tmp_path, "sk-1: team-b"))

    with pytest.raises(Refused) as caught:
        tenancy.caller({b"authorization": b"Bearer sk-1", b"x-llm-d-inference-fairness-id": b"a"})

    assert caught.value.status == 403
    assert "'team-b' is not declared in this deployment: the API key belongs to it" in caught.value.message
    assert "header" not in caught.value.message


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        (b"x-ballast-class", b"batch", "invalid_class"),
        (b"x-ballast-priority", b"high", "invalid_priority"),
        (b"x-ballast-priority", b"1001", "invalid_priority"),
        (b"x-ballast-priority", b"1.5", "invalid_priority"),
        (b"x-llm-d-slo-ttft-ms", b"soon", "invalid_slo"),
        (b"x-llm-d-slo-ttft-ms", b"-1", "invalid_slo"),
        (b"x-llm-d-slo-tpot-ms", b"nan", "invalid_slo"),
        (b"x-llm-d-slo-tpot-ms", b"inf", "invalid_slo"),
        (b"x-llm-d-inference-fairness-id", b"a b", "invalid_tenant"),
        (b"x-llm-d-inference-fairness-id", b"\xff", "invalid_tenant"),
        (b"x-llm-d-inference-fairness-id", b"a" * 254, "invalid_tenant"),
    ],
)
def test_a_header_that_means_nothing_gets_400_and_says_what_was_wanted(header: bytes, value: bytes, code: str) -> None:
    with pytest.raises(Refused) as caught:
        OPEN.caller({header: value})

    assert (caught.value.status, caught.value.code) == (400, code)
    assert header.decode() in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a mapping: write one `key: tenant` line per key, or {} for no key"),
        ("[a]", "is not a mapping"),
        ("a: [secret-key", "cannot be read (ParserError)"),
        ("1: team", "Entry 1"),
        ("ok: team\nkey: 5", "Entry 2"),
        ("key: 'a b'", "Entry 1"),
        ("' ': team", "a key that is not blank"),
        ("secret: team\n'secret ': other", "has the key of an earlier entry: blanks"),
    ],
)
def test_a_broken_keys_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(NotServed) as caught:
        make_keys(tmp_path, text)

    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_missing_keys_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotServed, match="No such file"):
        ApiKeys.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ({f"t{i}": 1 for i in range(40)}, (0, 40)),
        ({"heavy": 9, "t": 9}, (0, 3)),
        ({"me": 2, "heavy": 9, "t": 2}, (8, 10)),
    ],
    ids=["many tenants with one request", "one turn of each tenant", "own requests"],
)
def test_by_weight_a_request_waits_for_its_own_and_for_those_of_others_that_come_first(waiting, expected) -> None:
    tenancy = Tenancy([Tenant(name="heavy", weight=2)], ApiKeys({}))

    assert tenancy.num_before("me", waiting) == expected
