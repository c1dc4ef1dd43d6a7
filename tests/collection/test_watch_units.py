# SPDX-License-Identifier: Apache-2.0
"""The units of role ``watch``, rendered by Ansible: systemd accepts them, and the program understands its arguments."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plays import run_play

sys.path.insert(0, str(Path(__file__).parents[2] / "files" / "lifecycle"))
sys.path.append(str(Path(__file__).parents[2] / "plugins" / "module_utils"))

import liveness
import probe

ROOT = Path(__file__).parents[2]
ROLES = ROOT / "roles"
INSTANCES: list[dict[str, Any]] = [
    {
        "name": "prefill",
        "role": "prefill",
        "group": "main",
        "unit": "llmfleet-prefill.service",
        "url": "http://127.0.0.1:30000",
        "environment": {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "450"},
    },
    {
        "name": "decode",
        "role": "decode",
        "group": "main",
        "unit": "llmfleet-decode.service",
        "url": "http://[::1]:30002",
        "environment": {},
    },
    {
        "name": "router",
        "role": "router",
        "group": "main",
        "unit": "llmfleet-router.service",
        "url": "http://10.0.0.1:30001",
    },
]
PLAN = {
    "engine": {"dir": "/opt/llmfleet/releases/e1"},
    "model": {"served_name": "deepseek v4 $flash"},
    "instances": INSTANCES,
    "groups": {
        "main": {
            "prefill": [{}],
            "decode": [{}, {}],
            "router": [{"url": "http://10.0.0.1:30001"}, {"url": "http://10.0.0.2:30001"}],
        }
    },
}
RENDERED = {"probe": ["router"], "liveness": ["prefill", "decode"]}


def render(folder: Path, keys: int = 0, **variables: Any) -> dict[str, str]:
    """Text by the file's name, of instances with so many keys."""
    tasks = [
        {
            "name": f"Render the {kind}s of {program}",
            "ansible.builtin.template": {
                "src": str(ROOT / f"templates/{program}.{kind}.j2"),
                "dest": f"{folder}/llmfleet-{program}@{{{{ item.name }}}}.{kind}",
                "mode": "0644",
            },
            "loop": [instance | {"api_keys": keys} for instance in INSTANCES if instance["name"] in names],
        }
        for program, names in RENDERED.items()
        for kind in ("service", "timer")
    ]
    files = [ROLES / role / part / "main.yml" for role in ("pd_service", "watch") for part in ("defaults", "vars")]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    extra = {"role_path": str(ROLES / "watch"), "plan_host": PLAN}
    run_play(folder, play | {"vars_files": [str(file) for file in files]}, extra | variables)
    return {file.name: file.read_text() for file in folder.glob("llmfleet-*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("units")


@pytest.fixture(scope="module")
def units(folder: Path) -> dict[str, str]:
    return render(folder)


def arguments(unit: str) -> list[str]:
    """What the program is given, read as systemd reads the line."""
    (line,) = re.findall(r"(?m)^ExecStart=(.*)$", unit.replace("\\\n", " "))
    words = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]
    assert words[:3] == ["/usr/bin/python3", "-I", "-B"]
    assert re.fullmatch("/opt/llmfleet/lifecycle/[0-9a-f]{12}", words[3])
    return words[4:]


def test_each_router_is_probed_and_each_server_looked_at(units: dict[str, str]) -> None:
    names = [f"llmfleet-{program}@{name}" for program, named in RENDERED.items() for name in named]
    assert sorted(units) == sorted(f"{name}.{kind}" for name in names for kind in ("service", "timer"))


def test_the_probe_understands_its_arguments(units: dict[str, str]) -> None:
    command, *rest = arguments(units["llmfleet-probe@router.service"])
    options = vars(probe._arguments(rest))
    assert command == "probe"
    assert options == {
        "router": "router",
        "group": "main",
        "url": "http://10.0.0.1:30001",
        "model": "deepseek v4 $flash",
        "prompt": "The quick brown fox",
        "tokens": 8,
        "timeout": 30,
        "interval": 30,
        "out": Path("/run/llmfleet/probe"),
    }


def looked_at(units: dict[str, str], name: str) -> argparse.Namespace:
    command, *rest = arguments(units[f"llmfleet-liveness@{name}.service"])
    assert command == "liveness"
    return liveness._arguments(rest)


def test_a_look_understands_its_arguments(units: dict[str, str]) -> None:
    options = vars(looked_at(units, "decode"))
    assert "sglang:num_decode_prealloc_queue_reqs" in options.pop("work")
    assert options == {
        "instance": "decode",
        "unit": "llmfleet-decode.service",
        "url": "http://[::1]:30002",
        "health_route": "/health_generate",
        "router": ["http://10.0.0.1:30001", "http://10.0.0.2:30001"],
        "model": "deepseek v4 $flash",
        "peers": 1,
        "progress": ["sglang:realtime_tokens_total"],
        "active": "sglang:http_requests_active",
        "flat": 180,
        "stuck": 600,
        "max_restarts": 3,
        "interval": 30,
        "timeout": 25,
        "state": Path("/run/llmfleet/liveness"),
        "evidence": Path("/var/lib/llmfleet/evidence"),
        "proc_root": Path("/proc"),
    }


def test_a_server_that_waits_is_given_the_engines_own_time_limit_first(units: dict[str, str]) -> None:
    options = looked_at(units, "prefill")
    assert (options.stuck, options.peers) == (450 + 300, 0)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_the_engine_has_the_metrics_that_are_looked_at(units: dict[str, str], version: str) -> None:
    options = looked_at(units, "decode")
    metrics = (ROOT / f"tests/fixtures/engine/metrics_{version}.txt").read_text().splitlines()
    assert {*options.progress, *options.work, options.active} - set(metrics) == set()


def test_a_key_is_a_credential_and_nothing_else(units: dict[str, str], tmp_path: Path) -> None:
    for name, unit in render(tmp_path, keys=2).items():
        if name.endswith(".service"):
            instance = name.removesuffix(".service").split("@")[1]
            line = f"LoadCredential=api-keys:/etc/llmfleet/credentials/{instance}\n"
            assert unit.count(f"\n{line}") == 1
            assert unit.replace(line, "") == units[name]


def test_systemd_has_nothing_to_say(units: dict[str, str], folder: Path) -> None:
    """Where there is a systemd of a version that knows all of it; it needs no running one."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    files = [str(folder / name) for name in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
