# SPDX-License-Identifier: Apache-2.0
"""The table of what runs: what an operator sees, from an empty host to one that runs something else than planned."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._status import STATUS_COLUMNS, status_rows, status_table

NOW = 10_000_000_000


def instance(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "group": "a",
        "unit": f"llmfleet-{name}.service",
        "url": f"http://127.0.0.1/{name}",
        "gpus": [],
        "nodes": [],
        "revision": "new",
        "fingerprint": f"{name}-new",
    } | more


def unit(fingerprint: str, **more: Any) -> dict[str, Any]:
    return {
        "loaded": True,
        "active_state": "active",
        "main_pid": 7,
        "fingerprint": fingerprint,
        "restarts": 1,
        "started_monotonic_us": NOW - 90_000_000,
    } | more


def row(planned: dict[str, Any], running: dict[str, Any], **more: Any) -> dict[str, str]:
    given: dict[str, Any] = {"ready": [planned["name"]], "left": {}, "records": {}} | more
    return status_rows("h1", [planned], {planned["unit"]: running}, now_us=NOW, **given)[0]


def test_a_server_that_runs_what_is_planned() -> None:
    planned = instance("decode", "decode", gpus=[4, 5], nodes=[1])
    left = {
        "http://127.0.0.1/decode/metrics": {
            "num_running_reqs": 4,
            "num_queue_reqs": 2,
            "num_decode_transfer_queue_reqs": 1,
        }
    }
    assert row(planned, unit("decode-new"), left=left) == {
        "host": "h1",
        "group": "a",
        "instance": "decode",
        "role": "decode",
        "state": "active",
        "running": "new",
        "planned": "new",
        "ready": "yes",
        "queue": "3",
        "GPUs": "4,5",
        "nodes": "1",
        "restarts": "1",
        "uptime": "1min",
    }


def test_an_empty_host_has_a_row_without_anything_in_it() -> None:
    found = row(instance("decode", "decode"), unit("", loaded=False, active_state="inactive", main_pid=0))
    assert found["state"] == "absent"
    assert [found[column] for column in ("running", "ready", "queue", "restarts", "uptime")] == ["-"] * 5


def test_what_runs_is_named_by_the_record_that_knows_it() -> None:
    old = instance("decode", "decode", revision="old", fingerprint="decode-old")
    for name in ("good", "previous"):
        records = {"a": {"good": None, "previous": None, name: {"plan": {"instances": [old]}}}}
        found = row(instance("decode", "decode"), unit("decode-old"), records=records, ready=[])
        assert (found["running"], found["planned"], found["ready"]) == ("old", "new", "no")


def test_what_nobody_knows_is_shown_by_its_fingerprint() -> None:
    assert row(instance("decode", "decode"), unit("0123456789abcdef"))["running"] == "?01234567"


def test_another_fingerprint_of_the_same_revision_is_marked() -> None:
    old = instance("router", "router", fingerprint="router-old")
    records = {"a": {"good": {"plan": {"instances": [old]}}, "previous": None}}
    assert row(instance("router", "router"), unit("router-old"), records=records)["running"] == "new*"


def test_a_router_has_no_queue_here_and_a_silent_server_an_unknown_one() -> None:
    assert row(instance("router", "router"), unit("router-new"))["queue"] == "-"
    left = {"http://127.0.0.1/decode/metrics": "refused"}
    assert row(instance("decode", "decode"), unit("decode-new"), left=left)["queue"] == "?"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (59, "59s"), (60, "1min"), (3599, "59min"), (3600, "1h"), (47 * 3600, "47h"), (48 * 3600, "2d")],
)
def test_uptime(seconds: int, expected: str) -> None:
    now = 10**12
    started = unit("decode-new", started_monotonic_us=now - seconds * 10**6)
    planned = instance("decode", "decode")
    rows = status_rows("h1", [planned], {planned["unit"]: started}, [], {}, {}, now)
    assert rows[0]["uptime"] == expected


def test_the_table_has_headings_and_columns_under_each_other() -> None:
    rows = [row(instance(name, "decode"), unit(f"{name}-new")) for name in ("d", "decode-of-a-long-name")]
    lines = status_table(rows).splitlines()
    assert lines[0].split() == list(STATUS_COLUMNS)
    assert len({line.index("decode  active") for line in lines[1:]}) == 1
    assert status_table([]).split() == list(STATUS_COLUMNS)


def test_a_fallback_that_does_not_run_stands_by_and_one_that_runs_is_told_as_any_server() -> None:
    planned = instance("whole", "server")
    still = unit("", main_pid=0, active_state="inactive")
    assert row(planned, still)["state"] == "standby"
    assert row(planned, still | {"active_state": "failed"})["state"] == "failed"
    assert row(instance("decode", "decode"), still)["state"] == "inactive"
    found = row(planned, unit("whole-old"))
    assert (found["state"], found["running"], found["planned"]) == ("active", "?whole-ol", "new")
