# SPDX-License-Identifier: Apache-2.0
"""A model's folder with some of its JSON files changed, and the checkpoint left as it is. PRIVATE to the collection.

The overlay has a link for every entry of the checkpoint; a file that is changed is written anew: the checkpoint's own
JSON object with some keys replaced. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

#: What SGLang reads as defaults of sampling from a checkpoint's generation_config.json.
GENERATION_FILE = "generation_config.json"
GENERATION_KEYS = ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")


class OverlayError(Exception):
    """The checkpoint cannot be overlaid; says what was found, what was expected and what to do."""


def merged(text: str | None, changes: Mapping[str, Any], name: str) -> str:
    """The text of a changed file. ``text`` is the checkpoint's own, None where it has none. Raises OverlayError."""
    try:
        own = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise OverlayError(f"{name} is not JSON ({error}); expected an object; repair the checkpoint") from error
    if not isinstance(own, dict):
        raise OverlayError(f"{name} holds a {type(own).__name__}; expected an object; repair the checkpoint")
    return json.dumps({**own, **changes}, indent=1, sort_keys=True) + "\n"


def wanted(source: str, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """``{entry: "-> target" of a link, or the text of a file}``. Raises OverlayError, OSError."""
    found = {name: f"-> {os.path.join(source, name)}" for name in sorted(os.listdir(source))}
    for name, values in changes.items():
        path, text = os.path.join(source, name), None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as stream:
                text = stream.read()
        found[name] = merged(text, values, path)
    return dict(sorted(found.items()))


def current(path: str) -> dict[str, str]:
    """What an overlay holds now, in the form of ``wanted``; empty where there is none."""
    found = {}
    for entry in sorted(os.scandir(path), key=lambda item: item.name) if os.path.isdir(path) else []:
        if entry.is_symlink():
            found[entry.name] = f"-> {os.readlink(entry.path)}"
        elif entry.is_file():
            with open(entry.path, encoding="utf-8", errors="replace") as stream:
                found[entry.name] = stream.read()
    return found


def write(path: str, entries: Mapping[str, str]) -> None:
    """Write an overlay whole, beside what is there, and put it in its place."""
    partial = f"{path}.partial"
    if os.path.isdir(partial):
        shutil.rmtree(partial)
    os.makedirs(partial, mode=0o755)
    for name, content in entries.items():
        target = os.path.join(partial, name)
        if content.startswith("-> "):
            os.symlink(content[3:], target)
        else:
            with open(target, "w", encoding="utf-8") as stream:
                stream.write(content)
            os.chmod(target, 0o644)
    if os.path.isdir(path):
        shutil.rmtree(path)
    os.rename(partial, path)
