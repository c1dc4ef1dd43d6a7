# SPDX-License-Identifier: Apache-2.0
"""The part of the host's plan that the exporter needs: which instance uses which GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_log = logging.getLogger(__name__)


def parse(text: str) -> Mapping[int, str]:
    """GPU index -> instance name. Raises ValueError with what is wrong."""
    plan = json.loads(text)
    instances = plan.get("instances") if isinstance(plan, dict) else None
    if not isinstance(instances, list):
        raise ValueError("expected an object with a list `instances`")
    by_index: dict[int, str] = {}
    for instance in instances:
        name = instance.get("name") if isinstance(instance, dict) else None
        gpus = instance.get("gpus", []) if isinstance(instance, dict) else None
        if not isinstance(name, str) or not isinstance(gpus, list):
            raise ValueError("expected every instance to have a text `name` and a list `gpus`")
        for index in gpus:
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                raise ValueError(f"instance {name}: expected GPU indexes, found {index!r}")
            by_index[index] = name
    return MappingProxyType(by_index)


class PlanFile:
    """The plan file, read again when it changes. A missing or broken one is logged once and reads as None."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problem = ""

    def read(self) -> Mapping[int, str] | None:
        try:
            plan = parse(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("no plan, so no instance names and no expected GPUs: %s: %s", self._path, error)
            return None
        self._problem = ""
        return plan
