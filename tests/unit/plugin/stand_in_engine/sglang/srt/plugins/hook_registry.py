# SPDX-License-Identifier: Apache-2.0
"""Stand-in for SGLang's hook registry: a hook that cannot be applied is logged, and left out."""

from __future__ import annotations

import enum
import functools
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar

logger = logging.getLogger(__name__)


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


def wrap(original: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.REPLACE:
            return hook(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper


class HookRegistry:
    _hooks: ClassVar[dict[str, list[tuple[HookType, Callable[..., Any]]]]] = {}
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls._hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            try:
                path, _dot, name = target.rpartition(".")
                owner = pkgutil.resolve_name(path)
                for kind, hook in hooks:
                    setattr(owner, name, wrap(getattr(owner, name), hook, kind))
                cls._patched.add(target)
            except Exception:
                logger.exception("Failed to apply hooks to %s", target)
