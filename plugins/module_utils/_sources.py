# SPDX-License-Identifier: Apache-2.0
"""What a release is made of beside its wheels: the plugin, the kernels, and the patches of one engine version.

Read on the controller, from ``files/`` of the collection or from the operator's own folder of the same shape:
``plugin/``, ``kernels/``, ``engine/<version>/``. Standard library only. PRIVATE to the collection.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

#: Folders that are Python packages, with a ``pyproject.toml``; the order in which they are installed.
PACKAGES = ("kernels", "plugin")
#: Where the patches of the release's engine version lie in its ``src``.
PATCHES = "engine"
_SUFFIXES = (".py", ".toml", ".patch", ".json")


def read_sources(folder: str, version: str) -> dict[str, str]:
    """``{path in the release's src: text}``, sorted. Raises FileNotFoundError naming the part that is missing."""
    found: dict[str, str] = {}
    for name, part in [*((name, name) for name in PACKAGES), (PATCHES, f"{PATCHES}/{version}")]:
        top = os.path.join(folder, part)
        if not os.path.isdir(top):
            raise FileNotFoundError(f"{top} does not exist; expected the folders {', '.join(PACKAGES)}, {part}")
        for parent, folders, files in os.walk(top):
            folders[:] = sorted(item for item in folders if item != "__pycache__")
            for file in sorted(files):
                if file.endswith(_SUFFIXES):
                    path = os.path.join(parent, file)
                    with open(path, encoding="utf-8") as stream:
                        found[os.path.join(name, os.path.relpath(path, top))] = stream.read()
    return dict(sorted(found.items()))


def digests(sources: Mapping[str, str]) -> dict[str, str]:
    """``{path: sha256 of the text}``; what a release's identity and its integrity are taken from."""
    return {path: hashlib.sha256(text.encode()).hexdigest() for path, text in sorted(sources.items())}
