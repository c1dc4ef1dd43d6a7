# SPDX-License-Identifier: Apache-2.0
"""Compare the metrics in the source of the engine that is installed with the list the tests go by.

    <release>/venv/bin/python check_metrics.py tests/fixtures/engine/metrics_0.5.23.txt
    <release>/venv/bin/python check_metrics.py --list

A server exposes only what it has a value for, so the source is read: every call whose name is a text ``sglang:...``.
Exit status 1 and a line for each difference.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path


def names(root: Path) -> Iterator[str]:
    """Metric names in all modules below ``root``."""
    for file in root.rglob("*.py"):
        source = file.read_text(errors="replace")
        if "sglang:" not in source:
            continue
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            given = [word.value for word in call.keywords if word.arg == "name"] + call.args[:1]
            for value in given[:1]:
                if isinstance(value, ast.Constant) and str(value.value).startswith("sglang:"):
                    yield str(value.value)


def main() -> int:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        print("sglang is not installed beside this interpreter")
        return 1
    found = set(names(Path(spec.origin).parent / "srt"))
    if sys.argv[1] == "--list":
        print("\n".join(sorted(found)))
        return 0
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    expected = {line for line in lines if line and not line.startswith("#")}
    for name in sorted(found ^ expected):
        print(f"{name}: {'only in the source' if name in found else 'only in the list'}")
    print(f"{len(found)} metrics, {len(found ^ expected)} differences")
    return 1 if found != expected else 0


if __name__ == "__main__":
    sys.exit(main())
