# SPDX-License-Identifier: Apache-2.0
"""``templates/instance.service.j2``: what the units of the plan's instances say, rendered by Ansible."""

from __future__ import annotations

import configparser
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plays import run_play

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles" / "pd_service"
PREFILL: dict[str, Any] = {
    "name": "prefill",
    "role": "prefill",
    "group": "main",
    "unit": "llmfleet-prefill.service",
    "gpus": [0, 1],
    "ranks": 2,
    "features": {"queue_bound": "on", "index_keys": "bf16"},
    "binding": ["/usr/bin/numactl", "--membind=0", "--"],
    "settings": {"MemoryMax": "1000"},
    "argv": ["/opt/llmfleet/releases/e1/venv/bin/python", "-m", "sglang.launch_server", "100 %"],
    "url": "http://127.0.0.1:30000",
    "ports": {"http": 30000, "bootstrap": 8998},
    "python": "/opt/llmfleet/releases/e1/venv/bin/python",
    "fingerprint": "0123456789abcdef",
}
ROUTER = PREFILL | {
    "name": "router",
    "role": "router",
    "unit": "llmfleet-router.service",
    "gpus": [],
    "ranks": 0,
    "features": {},
    "binding": [],
    "settings": {},
    "url": "http://127.0.0.1:30001",
    "ports": {"http": 30001, "metrics": 29000},
}
FALLBACK = PREFILL | {
    "name": "whole",
    "role": "server",
    "unit": "llmfleet-whole.service",
    "gpus": [0, 1, 2, 3],
    "url": ROUTER["url"],
    "ports": {"http": 30001},
    "conflicts": [PREFILL["unit"], ROUTER["unit"]],
}
VARIABLES = {
    "role_path": str(ROLE),
    "plan_host": {"engine": {"dir": "/opt/llmfleet/releases/e1", "readiness_route": "/ready"}},
    "pd_service_after": [],
}


def render(tmp_path: Path, **variables: Any) -> dict[str, str]:
    """The units of prefill, router and fallback, by name."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROLE / "defaults/main.yml"), str(ROLE / "vars/main.yml")],
        "tasks": [
            {
                "name": "Render the units",
                "ansible.builtin.template": {
                    "src": str(ROOT / "templates/instance.service.j2"),
                    "dest": str(tmp_path) + "/{{ item.unit }}",
                    "mode": "0644",
                },
                "loop": [PREFILL, ROUTER, FALLBACK],
            }
        ],
    }
    run_play(tmp_path, play, {**VARIABLES, **variables})
    return {item["name"]: (tmp_path / item["unit"]).read_text() for item in (PREFILL, ROUTER, FALLBACK)}


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return render(tmp_path_factory.mktemp("units"))


def values(unit: str, key: str) -> list[str]:
    """The values of a key, continued lines joined."""
    return re.findall(rf"(?m)^{key}=(.*)$", unit.replace("\\\n", " "))


def option(command: str, name: str) -> list[str]:
    """What an option of a command line is given, as ``--name value`` or ``--name=value``."""
    words = shlex.split(command)
    following = [after for word, after in itertools.pairwise(words) if word == f"--{name}"]
    return following + [word.split("=", 1)[1] for word in words if word.startswith(f"--{name}=")]


def test_it_is_a_unit_file(units: dict[str, str]) -> None:
    for name, unit in units.items():
        parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(unit)
        assert parser.sections() == ["Unit", "Service", *([] if name == "whole" else ["Install"])]
        assert {"StartLimitIntervalSec", "StartLimitBurst"} & set(parser["Service"]) == set()


def test_a_start_is_checked_before_and_awaited_after(units: dict[str, str]) -> None:
    checked, plugin, _room, _note = values(units["prefill"], "ExecStartPre")
    (awaited,) = values(units["prefill"], "ExecStartPost")
    program = r"\+?/usr/bin/python3 +-I +-B +/opt/llmfleet/lifecycle/[0-9a-f]{12} +"
    assert re.match(program + "before-start ", checked)
    assert re.match(program + "ready ", awaited)
    assert checked.startswith("+")
    assert not awaited.startswith("+")
    assert "llmfleet_plugin" in plugin
    for command in (checked, awaited):
        assert option(command, "unit") == ["llmfleet-prefill.service"]
        assert option(command, "port") == ["bootstrap=8998", "http=30000"]
        assert option(command, "gpu") == ["0", "1"]
        assert option(command, "nvml-python") == [PREFILL["python"]]
    assert option(awaited, "url") == ["http://127.0.0.1:30000/ready"]
    assert json.loads(option(awaited, "features")[0]) == PREFILL["features"]
    assert option(awaited, "ranks") == ["2"]
    assert option(awaited, "reports") == ["/run/llmfleet/prefill/features"]
    assert option(checked, "note") == ["/run/llmfleet/prefill.starts"]


def test_a_server_does_not_start_without_a_tmp_that_it_can_write(units: dict[str, str], tmp_path: Path) -> None:
    _checked, _plugin, room, _note = values(units["prefill"], "ExecStartPre")
    for folder, status, said in ((tmp_path, 0, ""), (Path("/proc/nowhere"), 1, "free some space on its disk\n")):
        command = shlex.split(room.replace("%%", "%").replace("/tmp/.room", f"{folder}/.room"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert done.stderr.endswith(said)
        assert not (folder / ".room").exists()
    assert not [command for command in values(units["router"], "ExecStartPre") if "/tmp" in command]


@pytest.mark.parametrize(
    ("environment", "noted"),
    [("0123456789abcdef", "0123456789abcdef"), ("fedcba9876543210", "0123456789abcdef with fedcba9876543210")],
)
def test_a_start_notes_what_unit_and_environment_were_of(
    units: dict[str, str], tmp_path: Path, environment: str, noted: str
) -> None:
    note = values(units["prefill"], "ExecStartPre")[-1]
    # What systemd does to it: quotes as a shell has them, and %% for a percent sign.
    command = shlex.split(note.replace("%%", "%").replace("/run/llmfleet/prefill", str(tmp_path)))
    subprocess.run(command, check=True, env={"LLMFLEET_FINGERPRINT": environment})
    assert (tmp_path / "fingerprint").read_text() == noted


def test_a_router_is_asked_for_its_own_route_and_has_no_gpus(units: dict[str, str]) -> None:
    checked, _note = values(units["router"], "ExecStartPre")
    (awaited,) = values(units["router"], "ExecStartPost")
    assert option(awaited, "url") == ["http://127.0.0.1:30001/readiness"]
    assert option(checked, "port") == ["http=30001", "metrics=29000"]
    assert [option(awaited, name) for name in ("gpu", "nvml-python", "features")] == [[], [], []]


def test_what_an_operator_sets(tmp_path: Path) -> None:
    unit = render(
        tmp_path,
        pd_service_start_timeout=100,
        pd_service_stop_timeout=20,
        pd_service_start_attempts=3,
        pd_service_restart_delay=4,
        pd_service_restart_delay_max=60,
        pd_service_write_paths=["/srv/a store"],
    )["prefill"]
    assert values(unit, "StartLimitBurst") == ["3"]
    assert values(unit, "StartLimitIntervalSec") == [str(3 * (4 + 60 + 100 + 20))]
    assert values(unit, "RestartSec") == ["4"]
    assert values(unit, "TimeoutStopSec") == ["20"]
    (awaited,) = values(unit, "ExecStartPost")
    (limit,) = values(unit, "TimeoutStartSec")
    assert option(awaited, "within") == ["100"]
    assert int(limit) > 100
    assert option(values(unit, "ExecStartPre")[0], "delay") == ["4"]
    assert option(values(unit, "ExecStartPre")[0], "delay-max") == ["60"]
    assert values(unit, "ReadWritePaths") == ['-/var/cache/llmfleet/releases "/srv/a store"']


def test_a_router_never_gives_up(units: dict[str, str]) -> None:
    assert values(units["router"], "StartLimitIntervalSec") == ["0"]
    assert values(units["router"], "StartLimitBurst") == []


def test_a_server_writes_to_its_caches_only(units: dict[str, str]) -> None:
    assert values(units["prefill"], "ProtectSystem") == ["strict"]
    assert values(units["prefill"], "ReadWritePaths") == ["-/var/cache/llmfleet/releases"]


def test_a_fallback_stops_what_it_displaces_first_and_starts_with_nothing(units: dict[str, str]) -> None:
    unit = units["whole"]
    assert values(unit, "Conflicts") == ["llmfleet-prefill.service llmfleet-router.service"]
    assert values(unit, "After") == ["network-online.target llmfleet-prefill.service llmfleet-router.service"]
    assert values(unit, "WantedBy") == []
    # systemd reads it from either side: what is displaced says nothing of it.
    assert [values(units[name], "Conflicts") for name in ("prefill", "router")] == [[], []]
    assert option(values(unit, "ExecStartPre")[0], "port") == ["http=30001"]
    assert option(values(unit, "ExecStartPre")[0], "gpu") == ["0", "1", "2", "3"]
    assert option(values(unit, "ExecStartPost")[0], "url") == ["http://127.0.0.1:30001/ready"]
    assert values(unit, "StartLimitBurst") == ["20"]


def test_systemd_finds_nothing_to_say(units: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    files = []
    for name, unit in units.items():
        files.append(tmp_path / f"llmfleet-{name}.service")
        # Programs that are there on every machine.
        programs = r"/opt/llmfleet/releases/e1/venv/bin/python|/usr/bin/numactl"
        files[-1].write_text(re.sub(programs, "/usr/bin/python3", unit))
    # Units of one folder are read together, with what they say of each other.
    argv = ["systemd-analyze", "verify", "--man=no", *map(str, files)]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "llmfleet" in line]) == (0, [])
