# SPDX-License-Identifier: Apache-2.0
"""What a feature is, and how the environment asks for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmfleet_plugin._hooks import Hooks

#: The SGLang versions whose internals the hooks were written for and read in; every other one is refused.
VERSIONS = ("0.5.16", "0.5.23")
#: A variable that is unset, or set to this, leaves the engine as it is.
OFF = "off"


class FeatureError(Exception):
    """A feature cannot be given; says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Context:
    """What a feature may know when it is installed: the engine's version."""

    version: str


@dataclass(frozen=True)
class Feature:
    """One feature.

    ``variable`` turns it on by one of ``values``. ``hooks`` names, by SGLang version, everything that is hooked, with
    the signature that the hook was written for (as ``_hooks.signature`` writes it). ``install`` registers the hooks
    and returns what else is worth telling about the feature, as ``{name: text or number}``.
    """

    name: str
    variable: str
    values: tuple[str, ...]
    hooks: Mapping[str, Mapping[str, str]]
    install: Callable[[Context, Hooks], dict[str, Any]]
    needs: Mapping[str, str] | None = None


def wanted(features: tuple[Feature, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """``{feature: value}`` of what the environment turns on. Raises FeatureError for a value that no feature has."""
    found: dict[str, str] = {}
    for feature in features:
        value = environment.get(feature.variable, OFF) or OFF
        if value == OFF:
            continue
        if value not in feature.values:
            raise FeatureError(
                f"{feature.variable} is {value!r}; expected {OFF} or one of {', '.join(feature.values)}; "
                "set the feature in plan_features"
            )
        found[feature.name] = value
    for feature in features:
        if feature.name in found:
            for name, value in (feature.needs or {}).items():
                if found.get(name) != value:
                    raise FeatureError(
                        f"{feature.name} is {found[feature.name]} and {name} is {found.get(name, OFF)}; "
                        f"expected {name}: {value} with it; set both in plan_features"
                    )
    return found


def check_version(version: str) -> None:
    if version not in VERSIONS:
        raise FeatureError(
            f"SGLang is {version}; the hooks were written for {' and '.join(VERSIONS)}; "
            "use one of them, or turn every feature off"
        )
