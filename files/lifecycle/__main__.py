# SPDX-License-Identifier: Apache-2.0
"""The program that units run beside the servers; standard library only.

    /usr/bin/python3 -I -B /opt/llmfleet/lifecycle/<digest> COMMAND [OPTION ...]

COMMAND is one of COMMANDS; ``COMMAND --help`` tells its options. The folder is named by its content, so that it never
changes under a unit.
"""

from __future__ import annotations

import importlib
import sys

#: Command -> the module and the function, ``(arguments) -> exit status``, that carries it out.
COMMANDS = {
    "before-start": ("start", "before_start"),
    "ready": ("start", "ready"),
    "stopped": ("start", "stopped"),
    "probe": ("probe", "main"),
    "liveness": ("liveness", "main"),
    "router": ("router", "main"),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        print(
            f"found {arguments[0] if arguments else 'no command'}; expected one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    module, function = COMMANDS[arguments[0]]
    return int(getattr(importlib.import_module(module), function)(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
