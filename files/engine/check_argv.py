# SPDX-License-Identifier: Apache-2.0
"""Parse every command line of a plan with the parser of the engine or router that will receive it.

    <release>/venv/bin/python check_argv.py /etc/llmfleet/plan.json engine|router

With ``-`` for the file the plan, or ``{"instances": [...]}`` of one, is read from standard input.

Abbreviations are switched off: the engine's own parser takes any unambiguous prefix of a flag for the flag, so a wrong
name would go unnoticed until a new flag makes it ambiguous. Exit status 1 and a line for each rejected command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any


def engine_parser() -> Callable[[list[str]], Any]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return lambda argv: parser.parse_args(argv[argv.index("-m") + 2 :])


def router_parser() -> Callable[[list[str]], Any]:
    from smg.router_args import RouterArgs

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return lambda argv: parser.parse_args(argv[argv.index("launch") + 1 :])


def main() -> int:
    plan_file, kind = sys.argv[1:]
    if plan_file == "-":
        plan = json.load(sys.stdin)
    else:
        with open(plan_file, encoding="utf-8") as stream:
            plan = json.load(stream)
    parse = {"engine": engine_parser, "router": router_parser}[kind]()
    wanted = [entry for entry in plan["instances"] if (entry["role"] == "router") == (kind == "router")]
    rejected = 0
    for instance in wanted:
        try:
            parse(instance["argv"])
        except (argparse.ArgumentError, SystemExit, ValueError) as error:
            print(f"{instance['name']}: {error}: {' '.join(instance['argv'])}")
            rejected += 1
    print(f"{len(wanted) - rejected} accepted, {rejected} rejected")
    return 1 if rejected or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
