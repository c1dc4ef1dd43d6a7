# SPDX-License-Identifier: Apache-2.0
"""The API keys of a PD group: what one looks like, and what may be told of them. PRIVATE to the collection.

No function here puts a key into what it raises, and none but ``authorization`` and ``credential`` into what it returns.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

VARIABLE = "plan_api_keys"
FEATURE = "api_keys"
#: What the engine's plugin takes (``llmfleet_plugin.api_keys.KEY``); a test holds them equal.
KEY = re.compile(r"[\x21-\x7e]{16,512}")
#: The most that is kept valid at once; an overlap needs two.
MOST = 64
#: With these the engine serves requests by other means than the one HTTP server that asks for a key.
OTHER_DOORS = ("enable-smg-grpc", "grpc-mode", "grpc-port", "smg-grpc-mode")
OTHER_DOORS_ENVIRONMENT = ("SGLANG_GRPC_ENDPOINT", "SGLANG_RUST_SERVER")


def parse_api_keys(value: Any) -> list[str]:
    """plan_api_keys, the fleet's own key first. Raises RefusalError, which tells a key's place and never the key."""
    expected = "a list of different keys, each of 16 to 512 printable ASCII characters without spaces"
    cure = f"make one with `openssl rand -hex 32`, and keep {VARIABLE} in a vault"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RefusalError("api_keys", f"{VARIABLE} is no list", expected, f"write {VARIABLE} as a list; {cure}")
    keys = list(value)
    if len(keys) > MOST:
        raise RefusalError("api_keys", f"{VARIABLE} has {len(keys)} keys", f"at most {MOST}", "remove what nobody uses")
    for number, key in enumerate(keys, 1):
        if not isinstance(key, str):
            found = "is no text (it may be a number for YAML)"
        elif not KEY.fullmatch(key):
            found = f"has {len(key)} characters" + ("" if len(key) < 16 else ", or one that is not allowed")
        elif key in keys[: number - 1]:
            found = f"is key {keys.index(key) + 1} again"
        else:
            continue
        raise RefusalError("api_keys", f"key {number} of {VARIABLE} {found}", expected, cure)
    return [str(key) for key in keys]


def check_flags(flags: Mapping[str, Any], what: str) -> None:
    """Raises RefusalError for a flag that would have a key in it."""
    for name in flags:
        if "api-key" in name:
            raise RefusalError(
                "flag_secret",
                f"{what} sets {name}",
                "no key in a command line, where every user of the host can read it",
                f"remove {name} from {what} and put the key into {VARIABLE}; change the key, it was in the open",
            )


def digest(keys: Sequence[str]) -> str:
    """What changes when a key does; nothing where there is none. SHA-256 of 16 random characters tells nothing."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest() if keys else ""


def credential(keys: Sequence[str]) -> str:
    """The text of the credential file: a key in each line."""
    return "".join(f"{key}\n" for key in keys)


def authorization(read: Mapping[str, Any], name: str) -> dict[str, str]:
    """The header that a request of our own to the instance ``name`` needs: what the host's credential file says.

    ``read`` is what ``slurp`` registered in a loop over instances; empty where the instance has no keys.
    """
    for result in read.get("results", []):
        if result.get("item", {}).get("name") == name and "content" in result:
            own = base64.b64decode(result["content"]).decode("ascii").split("\n")[0]
            return {"Authorization": f"Bearer {own}"}
    return {}
