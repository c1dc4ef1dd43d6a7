# SPDX-License-Identifier: Apache-2.0
"""Faults in the demo's deployment, with the real engine, and what clients saw of each; ``tools/faults`` calls it.

The demo has to be up (``make demo``). Each fault is injected by ``tests/faults/inject.py`` on the host; the next begins
when the deployment serves again. With ``--output`` every row is kept as soon as there is one, and a run that was
interrupted goes on with the faults that have no row there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import on_host
from tools.demo import HOST

PROGRAM = f"python3 {on_host.TESTS}/faults/inject.py"
COLUMNS = ("whole", "refused", "failed", "broken")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each fault."""
    lines = ["| fault | whole | refused | failed | broken | not served | ready again | started anew |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        counts = " | ".join(str(row["outcomes"].get(name, 0)) for name in COLUMNS)
        times = " | ".join(f"{row[name]} s" if row[name] else "-" for name in ("unserved_s", "healthy_s"))
        anew = ", ".join(row["more"].get("main process replaced", [])) or "-"
        lines.append(f"| {row['about']} | {counts} | {times} | {anew} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/faults", description="Inject faults into the demo's deployment.")
    parser.add_argument("--only", metavar="FAULT[,FAULT...]", help="these faults; all, when it is not given")
    parser.add_argument("--output", type=Path, help="JSON with a row for each fault; rows in it are not run again")
    options = parser.parse_args()
    if problem := on_host.copy_programs(HOST):
        print(f"{problem}\nRun `make demo` first.", file=sys.stderr)
        return 2
    known = on_host.run(HOST, f"{PROGRAM} --list").stdout.split()
    wanted = options.only.split(",") if options.only else known
    if unknown := [name for name in wanted if name not in known]:
        print(f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    if options.output and options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    wanted = [name for name in wanted if name not in {row["fault"] for row in rows}]
    failed = 0
    for number, name in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {name} ", end="", flush=True)
        begin = time.monotonic()
        ran = on_host.run(HOST, f"{PROGRAM} --fault {name}")
        try:
            row = json.loads(ran.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            print(f"no result after {time.monotonic() - begin:.0f} s: {ran.stderr.strip()[-500:]}", flush=True)
            failed += 1
            continue
        rows.append(row)
        broken = row["broken_rules"]
        failed += bool(broken)
        told = "; ".join(broken) or "as expected"
        print(f"{told} ({time.monotonic() - begin:.0f} s) {row['outcomes']}", flush=True)
        if options.output:
            kept = {"command": "tools/faults", "columns": "tests/on_host/clients.py", "rows": rows}
            options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(rows)}\n\n{len(wanted) - failed} as expected, {failed} not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
