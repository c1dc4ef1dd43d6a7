# SPDX-License-Identifier: Apache-2.0
"""The artefact manifest: what may be downloaded, and the digest each download must have.

The manifest is ``files/artefacts.yml``: ``{"schema": 1, "artefacts": [entry, ...]}``. An entry has

========== =============================================================================================
name       normalised package name
version    exact version
kind       ``wheel``, ``deb`` or ``image``
arch       ``any`` or the packager's name for the architecture
file       file name (not for an image)
source     ``pypi``, the address of another index, or the distribution it comes from
sha256     digest of the file, 64 hexadecimal digits (not for an image)
size       bytes (not for an image)
verified_by what vouches for an image, which is built and so has no digest of its own
licence    what the package itself states
sets       names of the sets it belongs to; a set is what one consumer installs as a whole
========== =============================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA = 1
_COMMON = {"name", "version", "kind", "arch", "source", "licence", "sets"}
_FILE = {"file", "sha256", "size"}
#: kind -> the keys an entry of that kind has, no more and no fewer
KEYS: dict[str, set[str]] = {
    "wheel": _COMMON | _FILE,
    "deb": _COMMON | _FILE,
    "image": _COMMON | {"verified_by"},
}
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*\Z")
_SET = re.compile(r"[a-z][a-z0-9_.-]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

Entry = Mapping[str, Any]


class UnknownSetError(ValueError):
    """The manifest has no wheels for the set that was asked for."""


def sort_key(entry: Entry) -> tuple[str, str, str, str]:
    """Order of the entries in the manifest."""
    return str(entry["kind"]), str(entry["name"]), str(entry["version"]), str(entry["arch"])


def wheel_sets(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the sets that hold wheels, sorted."""
    return sorted({name for entry in manifest["artefacts"] if entry["kind"] == "wheel" for name in entry["sets"]})


def wheels(manifest: Mapping[str, Any], set_name: str) -> list[Entry]:
    """Wheel entries of one set, sorted by name.

    Raises UnknownSetError, naming the sets there are.
    """
    found = [entry for entry in manifest["artefacts"] if entry["kind"] == "wheel" and set_name in entry["sets"]]
    if not found:
        raise UnknownSetError(
            f"files/artefacts.yml has no wheels for the set {set_name!r}; expected one of "
            f"{', '.join(wheel_sets(manifest))}. "
            "Choose one of them, or add the set with tools/artefacts.py."
        )
    return sorted(found, key=sort_key)


def requirements(manifest: Mapping[str, Any], set_name: str) -> list[str]:
    """Lines of a requirements file that pins every wheel of a set by version and digest.

    The set is complete, so the lines are to be installed without resolving dependencies. Raises UnknownSetError.
    """
    return [
        f"{entry['name']}=={entry['version']} --hash=sha256:{entry['sha256']}" for entry in wheels(manifest, set_name)
    ]


def problems(manifest: Mapping[str, Any]) -> list[str]:
    """What is wrong with a manifest, one line each; empty when nothing is."""
    if manifest.get("schema") != SCHEMA:
        return [f"schema is {manifest.get('schema')!r}, expected {SCHEMA}"]
    entries = manifest.get("artefacts")
    if not isinstance(entries, list) or not entries:
        return ["artefacts is not a list of entries"]
    found = [f"{entry.get('name', '?')}: {text}" for entry in entries for text in _entry_problems(entry)]
    if found:
        return found
    if list(entries) != sorted(entries, key=sort_key):
        found.append("the entries are not sorted by kind, name, version and arch")
    found += [f"{key} occurs twice" for key in _twice(f"file {entry['file']}" for entry in entries if "file" in entry)]
    found += [
        f"{key} in one set"
        for key in _twice(f"two versions of {e['kind']} {e['name']} for {s}" for e in entries for s in e["sets"])
    ]
    return found


def _entry_problems(entry: Entry) -> Iterable[str]:
    expected = KEYS.get(str(entry.get("kind")))
    if expected is None:
        yield f"kind is {entry.get('kind')!r}, expected one of {', '.join(sorted(KEYS))}"
        return
    if set(entry) != expected:
        yield f"missing {sorted(expected - set(entry))}, unexpected {sorted(set(entry) - expected)}"
        return
    for key in sorted(expected - {"size", "sets"}):
        if not isinstance(entry[key], str) or not entry[key].strip():
            yield f"{key} is {entry[key]!r}, expected text"
            return
    if not _NAME.match(entry["name"]):
        yield f"name {entry['name']!r} is not a normalised package name"
    if re.search(r"[<>*~,\s]", entry["version"]):
        yield f"version {entry['version']!r} is not one exact version"
    if not entry["sets"] or list(entry["sets"]) != sorted(set(entry["sets"])):
        yield f"sets is {entry['sets']!r}, expected at least one name, sorted, none twice"
    yield from (
        f"set name {name!r} is not of the form {_SET.pattern}" for name in entry["sets"] if not _SET.match(name)
    )
    if "sha256" in expected and not _SHA256.match(entry["sha256"]):
        yield f"sha256 is {entry['sha256']!r}, expected 64 hexadecimal digits"
    if "size" in expected and not (
        isinstance(entry["size"], int) and not isinstance(entry["size"], bool) and entry["size"] > 0
    ):
        yield f"size is {entry['size']!r}, expected a number of bytes"


def _twice(keys: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    twice: set[str] = set()
    for key in keys:
        (twice if key in seen else seen).add(key)
    return sorted(twice)
