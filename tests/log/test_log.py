from __future__ import annotations

import json
import logging

from ballast_log import Log
from ballast_log.log import JsonFormatter, KeyValueFormatter


def test_a_log_line_is_an_event_with_fields(caplog) -> None:
    with caplog.at_level(logging.INFO, "test.log"):
        Log("test.log").info("pods planned", create=2, because='a "reason" here', ratio=0.123456789)
        Log("test.log").debug("not shown")
        Log("test.log").info("pods planned", tenant="a\r\x1b[2J\x9b")
    record, hostile = caplog.records

    assert (
        KeyValueFormatter()
        .format(record)
        .endswith(r'test.log pods planned create=2 because="a \"reason\" here" ratio=0.123457')
    )
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["event"], entry["create"], entry["level"]) == ("pods planned", 2, "info")
    assert KeyValueFormatter().format(hostile).endswith(r'tenant="a\r\u001b[2J\u009b"'), "no terminal acts on it"
