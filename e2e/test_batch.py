"""Offline jobs: whichever way a job is submitted, each item has one result, and it is the answer of the model."""

from __future__ import annotations

import json
from secrets import token_hex

import jobs
import pytest
from client import Client
from release import Release


def test_two_thousand_items_through_the_command_have_one_result_each(client: Client, queue: str) -> None:
    job = jobs.submit(client, queue, 2000)

    job.finish(seconds=600, compared=100)


@pytest.mark.short
def test_items_of_any_redis_client_with_the_least_of_rights_are_served_as_well(
    client: Client, release: Release, queue: str
) -> None:
    inbox, password, name = f"ballast:{{{queue}}}:inbox", token_hex(16), "raw"
    release.valkey("acl", "setuser", "submitter", "on", f">{password}", "resetkeys", f"~{inbox}", "-@all", "+xadd")
    lines = jobs.lines(50, name=name)
    entries = [f"XADD {inbox} * item '{json.dumps(line)}' job nightly tenant research" for line in lines]
    entries.append(f"XADD {inbox} * job nightly tenant research end 1")

    said = release.valkey(user="submitter", password=password, stdin="\n".join(entries) + "\n")
    refused = release.valkey("xlen", inbox, user="submitter", password=password, check=False)

    assert len(said.splitlines()) == len(entries)
    assert "NOPERM" in refused
    jobs.Submitted(client, queue, "nightly", 50, 16, name).finish(seconds=120, compared=10)


def test_a_line_that_cannot_be_served_is_an_error_result_beside_the_others(client: Client, queue: str) -> None:
    lines = jobs.lines(3)
    lines[1]["body"]["model"] = "gpt-4"

    results = jobs.results(client, lines, queue=queue, seconds=60)

    assert set(results) == {"item-0", "item-1", "item-2"}
    assert "gpt-4" in json.dumps(results["item-1"]["error"])
    assert results["item-0"]["error"] is results["item-2"]["error"] is None
