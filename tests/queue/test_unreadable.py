"""Values that cannot be read are skipped and named, and users in URLs are replaced."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from queue_objects import ids, make_status, submit

from ballast_queue.address import with_user
from ballast_queue.errors import InvalidAddress, InvalidJob, UnreadableValue
from ballast_queue.job import Result
from ballast_queue.ledger import Service
from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings, TenantSettings
from ballast_queue.unreadable import MOST_PLACES, Unreadable, text_of


def test_a_value_that_cannot_be_read_is_logged_once_with_its_place(caplog: pytest.LogCaptureFixture):
    found = Unreadable()
    for place in ("job a", "job b", "job a"):
        assert found.try_read(place, lambda: int("x")) is None

    assert caplog.messages == ["value in redis cannot be read, it is skipped"] * 2
    assert [record.fields for record in caplog.records] == [{"value": "job a"}, {"value": "job b"}]
    assert found.places == {"job a", "job b"}


def test_bytes_that_are_no_text_are_shown_as_escapes():
    assert text_of(b"\xffa\xc3\xa9") == "\\xffa\u00e9"


def test_a_service_that_is_no_number_is_left_out_of_the_ledger():
    service = Service.read([b"a", b"x", b"b", b"2.5", b"c", b"inf", b"d", b""])

    assert (service.level, service.tenants, service.texts) == (0, {"b": 2.5}, {"b": "2.5"})


@pytest.mark.parametrize(
    ("address", "is_taken"),
    [
        ("http://10.0.0.1:8000", True),
        ("https://[::1]:1", True),
        ("ftp://w:8000", False),
        ("http://:8000", False),
        ("http://w", False),
        ("w:8000", False),
    ],
)
def test_the_address_of_a_worker_has_a_scheme_a_host_and_a_port(address: str, is_taken: bool):
    try:
        found = make_status(address=address).address
    except ValidationError:
        found = None

    assert found == (address if is_taken else None)


def test_any_number_of_unreadable_values_takes_a_bounded_memory():
    found = Unreadable()
    for number in range(MOST_PLACES + 10):
        found.skip(f"job {number}")

    assert len(found.places) == MOST_PLACES


def test_a_place_counts_for_an_hour_after_its_value_was_last_skipped(caplog: pytest.LogCaptureFixture):
    clock = [0.0]
    found = Unreadable(lambda: clock[0])
    counts = []
    for clock[0] in (0.0, 3000.0, 6000.0):
        found.skip("job a")
        found.skip(f"job at {clock[0]}")
    for clock[0] in (6000.0, 9599.0, 9600.0):
        counts.append(len(found.places))
    found.skip("job a")

    assert counts == [3, 2, 0]
    assert [record.fields["value"] for record in caplog.records].count("job a") == 2


def test_queues_of_one_name_on_a_connection_log_a_value_once(queue):
    again = Queue(queue.store.connection, queue.name)

    assert again.store.unreadable is queue.store.unreadable


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://db.example:6379/0", "redis://ballast%3Aa%2Fb@db.example:6379/0"),
        ("rediss://old:secret@db.example:6380", "rediss://ballast%3Aa%2Fb@db.example:6380"),
        ("unix:///run/valkey.sock", "unix://ballast%3Aa%2Fb@/run/valkey.sock"),
    ],
)
def test_the_user_of_a_url_is_replaced_and_its_password_is_gone(url: str, expected: str):
    assert with_user(url, "ballast:a/b") == expected


def test_a_url_without_a_host_has_no_place_for_a_user():
    with pytest.raises(InvalidAddress, match="the host is missing"):
        with_user("redis://", "a")


@pytest.mark.parametrize(
    ("stored", "found"),
    [('{"tenants": [{"name": "hunter2/"}]}', "a value of tenants.0.name that"), ("hunter2", "a value that")],
    ids=["a field", "all of it"],
)
def test_settings_that_cannot_be_read_are_named_by_their_field_and_not_quoted(queue, desk, stored: str, found: str):
    desk.raw.hset(queue.store.keys.settings, "json", stored)
    with pytest.raises(UnreadableValue) as caught:
        queue.settings.read()

    assert str(caught.value).startswith(f"settings of queue '{queue.name}': found {found} this version of Ballast")
    assert queue.settings.tenants() == ()


def test_settings_are_in_force_even_if_the_names_of_their_tenants_cannot_be_kept(queue, desk):
    settings = QueueSettings(tenants=(TenantSettings(name="acme"),))
    desk.raw.set(queue.store.keys.declared, "hunter2")

    assert queue.settings.apply(settings)
    assert queue.settings.read() == settings
    desk.raw.delete(queue.store.keys.declared)


def test_a_number_that_lua_wrote_with_an_exponent_is_read(queue, desk, line):
    job_id = submit(queue, line, 2)
    desk.raw.hset(queue.store.keys.job(job_id), "asked_out", "6e+18")
    (head,) = queue.claimable.heads()
    (listed,) = queue.jobs.all()

    assert (head.output_left, listed.output_left) == (6 * 10**18, 6 * 10**18)
    assert queue.jobs.cancel(job_id).counts.cancelled == 2


def test_a_job_that_cannot_be_read_is_left_out_of_the_list_and_can_be_cancelled(queue, desk, line):
    good, bad, torn = (submit(queue, line, 1) for _ in range(3))
    desk.raw.hset(queue.store.keys.job(bad), "priority", "high")
    desk.raw.hset(queue.store.keys.job(torn), "key", "a\x1fb")
    listed = [job.id for job in queue.jobs.all()]
    with pytest.raises(UnreadableValue):
        queue.jobs.cancel(bad)

    assert listed == [good]
    assert queue.store.unreadable.places == {f"job {bad}", f"job {torn}"}
    assert desk.raw.hget(queue.store.keys.job(bad), "state") == b"cancelled"


def test_a_job_that_is_deleted_while_jobs_are_listed_counts_as_read(queue, desk, line):
    job_id = submit(queue, line, 1)
    desk.raw.zadd(queue.store.keys.jobs, {"deleted": 9})
    listed = [job.id for job in queue.jobs.all()]
    desk.raw.zrem(queue.store.keys.jobs, "deleted")

    assert (listed, queue.store.unreadable.places) == ([job_id], set())


@pytest.mark.parametrize("stored", ['{"custom_id":"r0"}', '{"custom_id":"r0","status_code":200,"body":nonsense}'])
def test_a_result_that_cannot_be_read_is_named_and_holds_up_no_other(queue, desk, line, stored):
    job_id = submit(queue, line, 1)
    results = queue.store.keys.part(job_id, "results")
    entry = desk.raw.xadd(results, {"i": "0", "r": stored})
    (claimed,) = queue.leases.claim(job_id, 1, "w1")
    queue.leases.finish("w1", claimed, Result(custom_id="r0", status_code=200, body={"ok": True}))
    found = list(queue.results.read(job_id))
    desk.raw.xdel(results, entry)

    assert [result.body for result in found] == [{"ok": True}]
    assert queue.store.unreadable.places == {f"result {entry.decode()} of job {job_id}"}


@pytest.mark.parametrize("body", ['{"a":' * 5000 + "0" + "}" * 5000, "[]"], ids=["nested too deep", "no object"])
def test_an_item_that_cannot_be_read_is_failed_and_holds_up_no_other(queue, desk, line, body):
    job_id = submit(queue, line, 2)
    stored = f'"r0"\n{{"custom_id":"r0","url":"/v1/completions","body":{body}}}'
    desk.raw.hset(queue.store.keys.part(job_id, "items"), "0", stored)
    claimed = queue.leases.claim(job_id, 2, "w1")
    (letter,), (found,) = queue.results.dead_letters(job_id), queue.results.read(job_id)

    assert [c.custom_id for c in claimed] == ["r1"]
    assert (letter.custom_id, letter.code, found.status_code) == ("r0", "unreadable_item", 500)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        "r0",
        *(f"{name}\n{{}}" for name in ("r0", '"a"b"', '"a\\q"', '"a\\"', '"a\tb"', '"a","status_code":200,"z":"b"')),
    ],
    ids=["no line", "no end", "no text", "a quote", "no escape", "an escaped end", "a tab", "fields"],
)
@pytest.mark.parametrize("how", ["claimed", "cancelled"])
def test_an_item_whose_line_is_lost_ends_by_another_name_and_holds_up_no_other(queue, desk, line, how, stored):
    job_id = submit(queue, line, 2)
    items = queue.store.keys.part(job_id, "items")
    sound = desk.raw.hget(items, "0")
    desk.raw.hdel(items, "0")
    if stored is not None:
        desk.raw.hset(items, "0", stored)
    if how == "cancelled":
        assert queue.jobs.cancel(job_id).state == "cancelled"
    else:
        assert [c.custom_id for c in queue.leases.claim(job_id, 2, "w1")] == ["r1"]
        desk.raw.hset(items, "0", sound)

    assert ids(queue, job_id)[0] == "line:lost-0"
    assert queue.jobs.get(job_id).counts.waiting == 0


def test_an_item_that_cannot_end_holds_up_no_other(valkey, queue_name, desk, line):
    queue = Queue.connect(valkey.url, queue_name)
    job_id = submit(queue, line, 2)
    desk.raw.hset(queue.store.keys.part(job_id, "items"), "0", "x")
    desk.raw.set(queue.store.keys.part(job_id, "dead"), "text")
    claimed = queue.leases.claim(job_id, 2, "w1")
    desk.raw.delete(*desk.raw.scan_iter(f"ballast:{{{queue_name}}}:*", count=1000))
    queue.close()

    assert [c.custom_id for c in claimed] == ["r1"]


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("key", lambda queue, line: queue.submissions.submit([line("a")], key="\udcff")),
        ("job", lambda queue, _: queue.jobs.get("\udcff")),
        ("job", lambda queue, _: queue.jobs.cancel("\udcff")),
        ("job", lambda queue, _: list(queue.results.read("\udcff"))),
    ],
    ids=["submit", "get", "cancel", "results"],
)
def test_an_argument_that_is_not_utf8_is_named(queue, line, what, call):
    with pytest.raises(InvalidJob, match=rf"^{what}: found the string '\\udcff', expected text in UTF-8$"):
        call(queue, line)
