from __future__ import annotations

import inspect
import io
import json
import math
import sys

import pytest

from ballast_queue.batch_lines import (
    CHUNK_BYTES,
    CHUNK_LINES,
    MOST_NESTING,
    bounded_lines,
    read_line,
    read_lines,
    take,
)
from ballast_queue.errors import (
    DeadlinePassed,
    EmptyJob,
    InvalidJob,
    JobNotFound,
    QueueError,
    QueueUnavailable,
    UnknownTenant,
)
from ballast_queue.functions import Line
from ballast_queue.job import JobState, Submission
from ballast_queue.settings import QueueSettings, TenantSettings
from ballast_queue.submissions import check_deadline

VALID = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}


def as_line(**given):
    return json.dumps({name: value for name, value in (VALID | given).items() if value is not ...}).encode()


def with_body(**given):
    return as_line(body=VALID["body"] | given)


BAD_LINES = {
    "no JSON": (b"{", "", "invalid_json", "found no JSON"),
    "a torn string": (b'{"a": "b', "", "invalid_json", "found no JSON (Unterminated string starting at column 7)"),
    "a list": (b"[]", "", "invalid_json", "found a list of 0, expected a JSON object"),
    "invalid UTF-8": (b'{"custom_id": "\xff"}', "", "invalid_utf8", "found byte 0xff at 15, expected UTF-8"),
    "text without Unicode": ('"\ud800"', "", "invalid_utf8", "found byte 0xed at 1, expected UTF-8"),
    "NaN": (b'{"x": NaN}', "", "invalid_json", "found NaN"),
    "a number without end": (b'{"x": ' + b"9" * 5000 + b"}", "", "invalid_json", "unreadable JSON"),
    "brackets without end": (b"[" * 100_000, "", "invalid_json", "unreadable JSON"),
    "too long": (b"x" * 5000, "", "line_too_long", "more than 4096 bytes"),
    "a good line before blanks without end": (as_line() + b" " * 5000, "", "line_too_long", "more than 4096 bytes"),
    "letters behind the object": (as_line() + b" X\r\n", "", "invalid_json", "found no JSON"),
    "lists in lists": (as_line(extra=json.loads("[" * 200 + "]" * 200)), "", "invalid_json", "more than 200 lists and"),
    "no custom_id": (as_line(custom_id=...), "", "missing_required_parameter custom_id", "custom_id: found nothing"),
    "an empty custom_id": (as_line(custom_id=""), "", "invalid_custom_id custom_id", "expected a string of 1 to 256"),
    "a long custom_id": (as_line(custom_id="x" * 257), "", "invalid_custom_id custom_id", "found 257 characters"),
    "a reserved custom_id": (as_line(custom_id="line:7"), "", "invalid_custom_id custom_id", "expected another name"),
    "the custom_id of a lost line": (
        as_line(custom_id="line:lost-7"),
        "",
        "invalid_custom_id custom_id",
        "another name",
    ),
    "a custom_id of a number": (as_line(custom_id=7), "", "invalid_custom_id custom_id", "found the number 7"),
    "a custom_id without Unicode": (as_line(custom_id="\ud800"), "", "invalid_custom_id custom_id", "lone surrogate"),
    "another method": (as_line(method="GET"), "a", "invalid_method method", "found the string 'GET', expected POST"),
    "another url": (as_line(url="/v1/nothing"), "a", "invalid_url url", "expected /v1/chat/completions"),
    "a url of a number": (as_line(url=1), "a", "invalid_url url", "url: found the number 1, expected a string"),
    "embeddings": (as_line(url="/v1/embeddings"), "a", "unsupported_url", "not supported yet"),
    "no body": (as_line(body=...), "a", "missing_required_parameter body", "body: found nothing"),
    "a body of text": (as_line(body="x"), "a", "invalid_type", "expected a JSON object"),
    "an unknown field": (as_line(extra=1), "a", "unknown_parameter", "an unknown field (the string 'extra')"),
    "a stream": (with_body(stream=True), "a", "invalid_value stream", "stream: found true"),
    "a stream with options": (
        with_body(stream=True, stream_options={"x": 1}),
        "a",
        "invalid_value stream_options",
        "and no stream",
    ),
    "options without a stream": (
        with_body(stream_options={}),
        "a",
        "invalid_value stream_options",
        "expected no value, and no stream",
    ),
    "its own priority": (with_body(priority=1), "a", "invalid_value priority", "set the priority of the whole job"),
    "another model": (
        with_body(model="x"),
        "a",
        "model_not_found model",
        "expected a model that this queue serves: m, n",
    ),
    "another model with a long name": (
        with_body(model="x" * 101),
        "a",
        "model_not_found model",
        f"found '{'x' * 100}',",
    ),
}
"""Lines with the custom_id, the code and the field of the error, and a part of its message."""


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_becomes_an_error_with_its_reason(name):
    raw, custom_id, found, sentence = BAD_LINES[name]
    code, _, field = found.partition(" ")
    most = 4096 if code == "line_too_long" else 10**6
    line, body = read_line(raw, QueueSettings(models=("m", "n"), max_line_bytes=most))
    error = json.loads(line.text)

    assert (line.kind, line.custom_id, body) == ("r", custom_id, None)
    assert (error["code"], error["param"]) == (code, field or None)
    assert sentence in error["message"]
    assert "None" not in error["message"], "it names what was found and what is expected"


EMBEDDINGS = QueueSettings(urls=("/v1/embeddings",))


def nested(depth):
    """A line whose innermost object is the last of `depth` objects inside each other."""
    inner = '{"a":' * (depth - 2) + "0" + "}" * (depth - 2)
    return f'{{"custom_id":"a","url":"/v1/embeddings","body":{{"model":"m","input":{inner}}}}}'


def test_a_line_may_nest_its_values_up_to_a_limit():
    depths = (MOST_NESTING, MOST_NESTING + 1, *range(MOST_NESTING + 2, 1100))
    taken = [depth for depth in depths if read_line(nested(depth), EMBEDDINGS)[0].kind == "a"]

    assert taken == [MOST_NESTING]


def test_a_line_is_refused_where_the_stack_of_the_reader_ends():
    """Decoding fits on a stack on which writing the same value again does not."""
    line = nested(MOST_NESTING)

    def with_frames_left(number):
        return read_line(line, EMBEDDINGS)[0] if number <= 0 else with_frames_left(number - 1)

    depth = sys.getrecursionlimit() - len(inspect.stack(0))
    found = [with_frames_left(depth - left) for left in range(100, 300)]
    refusals = [(line.custom_id, json.loads(line.text)) for line in found if line.kind == "r"]

    assert {line.kind for line in found} == {"a", "r"}
    assert {(name, error["code"]) for name, error in refusals} <= {("", "invalid_json"), ("a", "invalid_json")}
    assert not any("None" in error["message"] for _, error in refusals)


def test_good_lines_are_taken_as_they_stand():
    for raw in (as_line(), as_line(method=...), b"\xef\xbb\xbf" + as_line() + b"\r\n", as_line().decode()):
        line, body = read_line(raw, QueueSettings(models=("m",)))

        assert (line.kind, line.custom_id) == ("a", "a")
        assert body is not None
        assert json.loads(line.text)["body"] == VALID["body"]


@pytest.mark.parametrize(
    "given_fields",
    [{"custom_id": "x" * 256}, {"body": VALID["body"] | {"prompt": "{" * MOST_NESTING}}],
    ids=["the longest custom_id", "brackets that are text"],
)
def test_a_line_at_its_limits_is_good(given_fields):
    line, _ = read_line(as_line(**given_fields), QueueSettings())

    assert (line.kind, line.custom_id) == ("a", given_fields.get("custom_id", "a"))


@pytest.mark.parametrize("raw", [b"", b" \t\r\n", b"\xef\xbb\xbf\r\n"])
def test_a_line_without_content_is_blank(raw):
    assert read_line(raw, QueueSettings()) == (Line("b", "", b""), None)


@pytest.mark.parametrize(
    ("behind", "kind"), [(b"", "a"), (b"\n", "a"), (b"\r\n", "a"), (b"\n\n\n", "r"), (b" ", "r"), (b" \n", "r")]
)
def test_the_end_of_a_line_does_not_count_against_its_limit(behind, kind):
    line, _ = read_line(as_line() + behind, QueueSettings(max_line_bytes=len(as_line())))

    assert line.kind == kind


class Bounded(io.BytesIO):
    """A file that returns no more than some bytes at once."""

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size in range(104)
        return super().readline(size)


def test_a_huge_line_is_read_only_to_its_limit():
    lines = list(bounded_lines(Bounded(b"a\n" + b"x" * 1000 + b"\n" + b"b\n" + b"y" * 500), 100))

    assert [len(line) for line in lines] == [2, 103, 2, 103]
    assert lines[2] == b"b\n"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1] * CHUNK_LINES, [CHUNK_LINES]),
        ([1] * (CHUNK_LINES + 1), [CHUNK_LINES, 1]),
        ([1_500_000] * 4, [3, 1]),
        ([CHUNK_BYTES, 1, 1], [1, 2]),
        ([CHUNK_BYTES - 1, 1, 1], [2, 1]),
    ],
    ids=["as many as fit", "one more", "long lines", "a line that fills a chunk", "a line that almost does"],
)
def test_a_chunk_ends_with_the_line_that_fills_it(sizes: list[int], expected: list[int]):
    lines = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    rest = iter(lines)
    found = list(iter(lambda: take(rest), []))

    assert [len(chunk) for chunk in found] == expected
    assert [line for chunk in found for line in chunk] == lines


def test_a_chunk_has_the_prefix_key_of_its_first_good_line():
    other = as_line(custom_id="b", body=VALID["body"] | {"prompt": "other"})
    _, group = read_lines([b"{", as_line(), other], QueueSettings())

    assert group == read_line(as_line(), QueueSettings())[1].prefix_key != 0


def test_bad_lines_do_not_hold_up_the_others(queue, line, result):
    submission = queue.submissions.submit([line("a"), b"{", b"", line("a"), line("b", stream=True), line("c")])
    at_once = {found.custom_id: found.error["code"] for found in queue.results.read(submission.job_id)}
    for claimed in queue.leases.claim(submission.job_id, 9, "w1"):
        queue.leases.finish("w1", claimed, result(claimed))
    names = sorted(found.custom_id for found in queue.results.read(submission.job_id))

    assert (submission.accepted, submission.rejected, submission.is_new) == (2, 3, True)
    assert at_once == {"line:2": "invalid_json", "line:4": "duplicate_custom_id", "b": "invalid_value"}
    assert names == ["a", "b", "c", "line:2", "line:4"]
    assert queue.jobs.get(submission.job_id).state is JobState.COMPLETED


def test_a_queue_without_settings_takes_whatever_some_engine_serves(queue, line):
    """Its first worker refuses at the claim what its own engine does not serve."""
    embed, tools = {"model": "bge", "input": ["a ship", "the sea"]}, [{"type": "function", "function": {"name": "f"}}]
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    others = {"a": ("/v1/embeddings", embed), "b": ("/v1/chat/completions", chat), "c": ("/v1/moderations", embed)}
    lines = [as_line(custom_id=name, url=url, body=body) for name, (url, body) in others.items()]
    before = queue.submissions.submit(lines)
    queue.settings.apply(QueueSettings())
    native = queue.submissions.submit(lines)

    assert [claimed.custom_id for claimed in queue.leases.claim(before.job_id, 9, "w1")] == ["a", "b"]
    assert (before.rejected, native.rejected) == (1, 3)


def test_a_bad_line_and_a_good_one_of_the_same_name_are_told_apart(queue, line):
    submission = queue.submissions.submit([line("a", stream=True), line("a"), line("a", stream=True)])

    assert (submission.accepted, submission.rejected) == (0, 3)
    assert [found.custom_id for found in queue.results.read(submission.job_id)] == ["a", "line:2", "line:3"]


def test_a_job_without_a_good_line_fails_with_its_reason(queue):
    submission = queue.submissions.submit([b"x", b"y"])
    job = queue.jobs.get(submission.job_id)

    assert job.state is JobState.FAILED
    assert "none of its 2 lines was accepted" in job.reason
    assert (job.counts.failed, len(list(queue.results.read(job.id)))) == (2, 2)


@pytest.mark.parametrize("lines", [[], [b""], [b"\n", "  \r\n"] * 600])
def test_an_empty_file_is_refused_and_leaves_nothing(queue, lines):
    with pytest.raises(EmptyJob, match=r"^found no line, expected at least one request in OpenAI's batch format$"):
        queue.submissions.submit(lines)

    assert queue.jobs.all() == []


def test_the_blank_lines_before_the_first_one_count_in_the_names_of_lines(queue):
    job_id = queue.submissions.submit([b"\n"] * (CHUNK_LINES + 100) + [b"{"]).job_id

    assert [found.custom_id for found in queue.results.read(job_id)] == [f"line:{CHUNK_LINES + 101}"]


def test_the_queue_decides_tenants_models_and_priorities(queue, line):
    tenants = (TenantSettings(name="acme", max_priority=5), TenantSettings(name="blue"))
    queue.settings.apply(QueueSettings(tenants=tenants, models=("small",)))
    submission = queue.submissions.submit([line("a"), line("b", model="big")], tenant="acme", priority=50)
    (refused,) = queue.results.read(submission.job_id)

    assert queue.jobs.get(submission.job_id).priority == 5
    assert "expected a model that this queue serves: small" in refused.error["message"]
    with pytest.raises(UnknownTenant, match="found 'green', expected a tenant that this queue declares: acme, blue"):
        queue.submissions.submit([line("a")], tenant="green")


@pytest.mark.parametrize(
    ("given_terms", "sentence"),
    [
        ({"tenant": "a|b"}, "tenant: found the string 'a|b', expected letters, digits, '.', '_', '/' and '-', with a "),
        ({"tenant": "a/"}, " and '-', with a letter or digit at both ends"),
        ({"tenant": ""}, "tenant: found the string ''"),
        ({"priority": 1001}, "priority: found 1001, expected -1000 to 1000"),
        ({"deadline": float("nan")}, "deadline: found nan"),
        ({"deadline": 1e12}, "deadline: found 1000000000000.0, expected Unix seconds between 0 and 1e11"),
        ({"key": ""}, "key: found 0 characters"),
        ({"key": "k" * 257}, "key: found 257 characters, expected 1 to 256"),
    ],
)
def test_the_terms_of_a_job_are_checked(queue, line, given_terms, sentence):
    with pytest.raises(InvalidJob) as caught:
        queue.submissions.submit([line("a")], **given_terms)

    assert sentence in str(caught.value)
    assert queue.jobs.all() == []


def test_a_refused_tenant_is_told_some_of_those_that_are_declared():
    declared = QueueSettings(tenants=tuple(TenantSettings(name=f"t{i:02}") for i in range(30)))
    with pytest.raises(UnknownTenant) as caught:
        declared.priority_of("other", 0)

    assert str(caught.value).endswith("declares: " + ", ".join(f"t{i:02}" for i in range(20)))


@pytest.mark.parametrize(("priority", "is_taken"), [(-1001, False), (-1000, True), (1000, True), (1001, False)])
def test_a_priority_has_its_bounds(priority: int, is_taken: bool):
    try:
        found = QueueSettings().priority_of("any", priority)
    except InvalidJob:
        found = None

    assert found == (priority if is_taken else None)


@pytest.mark.parametrize(
    ("deadline", "is_taken"), [(0, False), (0.5, True), (99_999_999_999.5, True), (1e11, False), (math.nan, False)]
)
def test_a_deadline_has_its_bounds(deadline: float, is_taken: bool):
    try:
        found = check_deadline(deadline)
    except InvalidJob:
        found = None

    assert found == (deadline if is_taken else None)


def test_settings_of_another_version_are_named_with_what_to_do(queue, desk, line):
    desk.raw.hset(queue.store.keys.settings, "json", '{"max_attempts": "many"}')
    with pytest.raises(QueueError) as caught:
        queue.submissions.submit([line("a")])

    assert str(caught.value) == (
        f"settings of queue '{queue.name}': found a value of max_attempts that this version of Ballast cannot read: "
        "use the version that the workers run"
    )


def test_a_deadline_in_the_past_is_refused_by_the_servers_clock(queue, line):
    with pytest.raises(DeadlinePassed, match="expected a time after now"):
        queue.submissions.submit([line("a")], deadline=queue.now() - 1)


def test_the_same_key_is_the_same_job_for_its_tenant(queue, line):
    first = queue.submissions.submit([line("a")], key="nightly", tenant="acme")
    again = queue.submissions.submit([line("a")], key="nightly", tenant="acme")
    other = queue.submissions.submit([line("a")], key="nightly", tenant="blue")

    assert (again.job_id, again.is_new, again.accepted) == (first.job_id, False, 1)
    assert other.job_id != first.job_id
    assert other.is_new


def test_a_job_that_was_closed_before_answers_with_what_it_took(queue, line):
    lines = [line("a"), b"{", line("b", stream=True)]
    first = queue.submissions.submit(lines, key="k" * 256)
    again = queue.submissions.submit(lines, key="k" * 256)

    assert (first.accepted, first.rejected, first.is_new, first.was_closed) == (1, 2, True, False)
    assert again == Submission(first.job_id, 1, 2, is_new=False, was_closed=True)


def test_a_job_that_is_deleted_while_it_is_submitted_is_named(queue, desk, line):
    def deleted():
        for i in range(1200):
            if i == 700:
                (job,) = queue.jobs.all()
                queue.jobs.cancel(job.id)
                desk.outlive_results(job.id)
                assert queue.timers.run_due() == 1
            yield line(f"r{i}")

    with pytest.raises(JobNotFound, match=f"found no job 'job-.*' in queue '{queue.name}'"):
        queue.submissions.submit(deleted())


def test_progress_is_told_in_lines(queue, line):
    told = []
    queue.submissions.submit((line(f"r{i}") for i in range(1200)), on_progress=told.append)

    assert told == [500, 1000, 1200]


def test_jobs_that_open_alike_share_a_prefix_key(queue, line):
    def chat(custom_id, system):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": custom_id}]
        return as_line(custom_id=custom_id, url="/v1/chat/completions", body={"model": "m", "messages": messages})

    for name, system in (("a", "Be brief."), ("b", "Be brief."), ("c", "Be long.")):
        queue.submissions.submit([chat(name, system)])
    first, second, third = (head.prefix_key for head in queue.claimable.heads())

    assert first == second != third
    assert 0 not in {first, third}


def test_a_server_that_is_gone_is_named(queue_name):
    from ballast_queue.redis_store import Queue

    with pytest.raises(QueueUnavailable, match=r"unavailable \(the connection was refused\): check that it"):
        Queue.connect("redis://127.0.0.1:1", queue_name)
