# SPDX-License-Identifier: Apache-2.0
"""What is true of every role: its rooms are there, and its defaults and its argument_specs say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
ROOMS = ("main", "precheck", "install", "configure", "verify")


def load(role: str, file: str) -> Any:
    return yaml.safe_load((ROOT / "roles" / role / file).read_text())


def options_of(role: str) -> dict[str, Any]:
    options: dict[str, Any] = load(role, "meta/argument_specs.yml")["argument_specs"]["main"].get("options", {})
    return options


def nested(options: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Options and their sub-options by dotted path."""
    found: dict[str, dict[str, Any]] = {}
    for name, option in options.items():
        found[f"{path}{name}"] = option
        found |= nested(option.get("options") or {}, f"{path}{name}.")
    return found


def test_every_role_of_the_architecture_exists() -> None:
    expected = {
        "engine",
        "gateway",
        "gpu_driver",
        "gpu_exporter",
        "grafana",
        "host",
        "model",
        "pd_service",
        "plan",
        "prometheus",
        "rollout",
        "router",
        "watch",
    }
    assert set(ROLES) == expected


@pytest.mark.parametrize("role", ROLES)
def test_rooms(role: str) -> None:
    assert {room for room in ROOMS if (ROOT / "roles" / role / "tasks" / f"{room}.yml").is_file()} == set(ROOMS)


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_specs_name_the_same_variables(role: str) -> None:
    optional = {name for name, option in options_of(role).items() if not option.get("required", False)}
    assert set(load(role, "defaults/main.yml") or {}) == optional


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_specs_agree_on_values(role: str) -> None:
    defaults = load(role, "defaults/main.yml") or {}
    stated = {name: option["default"] for name, option in options_of(role).items() if "default" in option}
    assert {name: defaults[name] for name in stated} == stated


@pytest.mark.parametrize("role", ROLES)
def test_public_variables_carry_the_name_of_their_role(role: str) -> None:
    assert [name for name in load(role, "defaults/main.yml") or {} if not name.startswith(f"{role}_")] == []


@pytest.mark.parametrize("role", ROLES)
def test_every_option_has_a_type_and_a_description(role: str) -> None:
    options = nested(options_of(role))
    assert [name for name, option in options.items() if not {"type", "description"} <= set(option)] == []
    assert [name for name, option in options.items() if option.get("type") == "list" and "elements" not in option] == []


@pytest.mark.parametrize("role", ROLES)
def test_the_entry_point_is_described(role: str) -> None:
    assert {"short_description", "description"} <= set(load(role, "meta/argument_specs.yml")["argument_specs"]["main"])
