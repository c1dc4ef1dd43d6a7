# SPDX-License-Identifier: Apache-2.0
"""Apply and revert every engine patch on copies of the files of an engine that is installed or unpacked.

    python check_patches.py ROOT [PATCHES]

ROOT is the folder that holds the package ``sglang``; PATCHES the one with ``manifest.json`` (default: the collection's
for the version that the engine's metadata states). Needs the standard library and ``_patch.py``, in the collection or
beside this file. The engine's own files are read and left alone. Prints a line for each patch; exit status 1 when one
does not fit, or when there is none.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

COLLECTION = Path(__file__).resolve().parents[2]
sys.path.append(str(COLLECTION / "plugins" / "module_utils"))

import _patch  # type: ignore[import-not-found]  # noqa: E402  (its own name on a host: Ansible is not there)


def version_of(root: Path) -> str:
    """The version in the name of the engine's metadata folder."""
    found = [re.fullmatch(r"sglang-(.+)\.dist-info", path.name) for path in root.glob("sglang-*.dist-info")]
    versions = sorted({match[1] for match in found if match})
    if len(versions) != 1:
        raise SystemExit(
            f"{root} holds the metadata of {versions or 'no sglang'}; expected one: name the folder of the patches"
        )
    return versions[0]


def check(root: Path, folder: Path, entry: dict[str, str]) -> str:
    """Take one file through all its states; returns "" or what is wrong."""
    text = (folder / entry["patch"]).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / entry["file"]
        copy.parent.mkdir(parents=True)
        if (root / entry["file"]).is_file():
            shutil.copyfile(root / entry["file"], copy)
        try:
            _patch.revert(name, entry, text)
            stock = copy.read_bytes()
            steps = [_patch.apply(name, entry, text), _patch.apply(name, entry, text), _patch.state(name, entry)]
            digest = hashlib.sha256(copy.read_bytes()).hexdigest()
            steps += [_patch.revert(name, entry, text), _patch.state(name, entry)]
        except _patch.PatchError as error:
            return str(error)
        if steps != [True, False, "after", True, "before"] or digest != entry["after"] or copy.read_bytes() != stock:
            return f"apply, apply, state, revert, state gave {steps} and digest {digest}; expected {entry['after']}"
    return ""


def main() -> int:
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    root = Path(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) == 3 else COLLECTION / "files" / "engine" / version_of(root)
    if not (folder / "manifest.json").is_file():
        raise SystemExit(f"{folder} has no manifest.json; expected the patches of the engine's version: name a folder")
    entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["patches"]
    wrong = 0
    for entry in entries:
        problem = check(root, folder, entry)
        now = _patch.state(str(root), entry)
        print(f"{entry['file']} ({now} here): {problem or 'applies and reverts'}")
        wrong += bool(problem)
    print(f"{len(entries) - wrong} fit, {wrong} do not")
    return 1 if wrong or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
