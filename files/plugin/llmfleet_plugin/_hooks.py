# SPDX-License-Identifier: Apache-2.0
"""Hooks on the engine through its own registry, each of them checked.

SGLang's registry resolves targets late, logs what it cannot hook and goes on. So every target is resolved and its
signature compared before the first hook is registered, and afterwards each has to be among those that were applied.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from llmfleet_plugin._feature import FeatureError


def signature(function: Callable[..., Any]) -> str:
    """Names, kinds and presence of defaults: ``(self, req, is_retracted=)``. Annotations and values are left out,
    since they change without changing how a hook is called."""
    words: list[str] = []
    starred = False
    for parameter in inspect.signature(inspect.unwrap(function)).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"*{parameter.name}")
            starred = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            words.append(f"**{parameter.name}")
        else:
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                words.append("*")
                starred = True
            words.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return f"({', '.join(words)})"


def resolve(target: str) -> Any:
    """The function, method or class of a dotted name. Raises FeatureError when there is none."""
    path, _dot, name = target.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise FeatureError(
            f"{target} cannot be found ({error}); expected it as in the SGLang version the hook was written for; "
            "rebuild the release from its lock, or turn the feature off"
        ) from error


def check_targets(expected: Mapping[str, str]) -> None:
    """Compare the signature of every target with the one that the hook was written for."""
    for target, wrote_for in expected.items():
        found = signature(resolve(target))
        if found != wrote_for:
            raise FeatureError(
                f"{target} has the signature {found}; expected {wrote_for}; "
                "rebuild the release from its lock, or turn the feature off"
            )


class Hooks:
    """Registers hooks for one feature; only on targets that its table names."""

    def __init__(self, expected: Mapping[str, str]) -> None:
        check_targets(expected)
        self.expected = expected
        self.registered: set[str] = set()

    def _register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if target not in self.expected:
            raise FeatureError(f"{target} is hooked and not in the feature's table; expected its signature there")
        HookRegistry.register(target, hook, HookType[kind])
        self.registered.add(target)

    def around(self, target: str, hook: Callable[..., Any]) -> None:
        """``hook(original, *args, **kwargs)`` in place of the target."""
        self._register(target, hook, "AROUND")

    def after(self, target: str, hook: Callable[..., Any]) -> None:
        """``hook(result, *args, **kwargs)`` after the target; None keeps the result."""
        self._register(target, hook, "AFTER")

    def replace(self, target: str, hook: Callable[..., Any]) -> None:
        """``hook`` instead of the target."""
        self._register(target, hook, "REPLACE")

    def apply(self) -> None:
        """Apply what was registered. Raises FeatureError when SGLang's registry left a target alone."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        if unused := set(self.expected) - self.registered:
            raise FeatureError(f"{', '.join(sorted(unused))} is in the feature's table and was not hooked")
        HookRegistry.apply_hooks()
        if missed := self.registered - set(HookRegistry._patched):
            raise FeatureError(
                f"SGLang did not hook {', '.join(sorted(missed))}; its log names the reason; "
                "turn the feature off to start without it"
            )
