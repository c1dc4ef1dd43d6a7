# SPDX-License-Identifier: Apache-2.0
"""Run the router with the API keys of its unit's credential, which it takes from its command line only.

    <router>/venv/bin/python -I -B /opt/llmfleet/lifecycle/<digest> router launch [OPTION ...]

The options are the router's own. The keys are added to them in this process, so no command line that anybody can read
has them. The first key is what the router shows to its servers, and what lets somebody see and change its workers; the
others are accepted from clients only. What a client has shown goes on to the servers, so they have to accept them all.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from credentials import CREDENTIAL, read_api_keys

#: Under which name the router counts and separates what clients store; one name, so that a client may change its key.
TENANT = "clients"


def with_keys(arguments: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The router's arguments and its keys."""
    own, *others = keys
    return [*arguments, f"--api-key={own}", *(f"--tenant-api-key={TENANT}:{key}" for key in others)]


def main(arguments: Sequence[str]) -> int:
    try:
        keys = read_api_keys()
    except (OSError, UnicodeError) as error:
        # A text that cannot be decoded is in the error, and it is a key's.
        print(f"the credential {CREDENTIAL} cannot be read: {type(error).__name__}", file=sys.stderr)
        return 1
    if not keys:
        # Without a key the router would let everybody in.
        print(
            f"found no key in the credential {CREDENTIAL}; expected one a line in the file that the unit's "
            "LoadCredential= names. Run the playbook again: it writes that file from plan_api_keys",
            file=sys.stderr,
        )
        return 1
    # The modules beside this one are not the router's.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
    sys.argv = ["smg", *with_keys(arguments, keys)]
    return int(importlib.import_module("smg.cli").main() or 0)
