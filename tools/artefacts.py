# SPDX-License-Identifier: Apache-2.0
"""Keep ``files/artefacts.yml``, the one manifest of everything that is downloaded.

    python -m tools.artefacts add --set router ~/wheels/*.whl     entries from files held: digests are computed
    python -m tools.artefacts resolve --set NAME REQUIREMENT...   entries from PyPI: digests are copied from its index
    python -m tools.artefacts check                               is the manifest complete and in order?

``add`` and ``resolve`` replace what the set held before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from ansible_collections.llmfleet.sglang.plugins.module_utils import _artefacts

from tools import MANIFEST

Entry = dict[str, Any]

UNSTATED = "unknown (see the package)"
PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"
KEY_ORDER = ("name", "version", "kind", "arch", "file", "source", "sha256", "size", "verified_by", "licence", "sets")
#: The Python and the C library of the oldest target, Debian 12.
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_36"
HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# The one artefact manifest: every download of the collection, with the digest it must have.
# Kept by `python -m tools.artefacts`, not by hand; fields are described in plugins/module_utils/_artefacts.py.
"""


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, as yamllint expects."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def load(path: Path = MANIFEST) -> dict[str, Any]:
    """Read the manifest; an empty one where there is none yet."""
    if not path.exists():
        return {"schema": _artefacts.SCHEMA, "artefacts": []}
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def save(manifest: Mapping[str, Any], path: Path = MANIFEST) -> None:
    """Write the manifest, refusing one that does not pass the check."""
    if found := _artefacts.problems(manifest):
        raise SystemExit("\n".join(found))
    entries = [{key: entry[key] for key in KEY_ORDER if key in entry} for entry in manifest["artefacts"]]
    text = yaml.dump(
        {"schema": manifest["schema"], "artefacts": entries},
        Dumper=_Dumper,
        sort_keys=False,
        width=1000,
        default_flow_style=None,
    )
    path.write_text(f"{HEADER}---\n{text}")


def merge(manifest: Mapping[str, Any], set_name: str, new: Iterable[Entry]) -> dict[str, Any]:
    """The manifest with ``set_name`` holding exactly the entries in ``new``."""
    held: dict[tuple[str, str, str, str], Entry] = {}
    for entry in manifest["artefacts"]:
        if sets := [name for name in entry["sets"] if name != set_name]:
            held[_artefacts.sort_key(entry)] = {**entry, "sets": sets}
    for entry in new:
        known = held.setdefault(_artefacts.sort_key(entry), {**entry, "sets": []})
        if known.get("sha256") != entry.get("sha256"):
            raise SystemExit(
                f"{entry['name']} {entry['version']}: {entry['sha256']} differs from the manifest's {known['sha256']}"
            )
        known["sets"] = sorted({*known["sets"], set_name})
    return {"schema": _artefacts.SCHEMA, "artefacts": sorted(held.values(), key=_artefacts.sort_key)}


def sha256(path: Path) -> str:
    """Digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def normalise(name: str) -> str:
    """Package name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(expression: str | None, text: str | None, classifiers: Iterable[str]) -> str:
    """The licence a package states: its SPDX expression, else its classifiers, else a short licence field."""
    if expression:
        return expression
    named = sorted({c.split(" :: ")[-1] for c in classifiers if c.startswith("License :: ") and c.count(" :: ") > 1})
    if named:
        return ", ".join(named)
    short = (text or "").strip()
    return short if 0 < len(short) <= 60 and "\n" not in short else UNSTATED


def wheel(path: Path) -> Entry:
    """Entry of a wheel held on disk; sets are left to the caller."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        meta = HeaderParser().parsestr(archive.read(name).decode())
    version = str(meta["Version"])
    return {
        "name": normalise(str(meta["Name"])),
        "version": version,
        "kind": "wheel",
        "arch": wheel_arch(path.name),
        "file": path.name,
        "source": PYTORCH_CPU if version.endswith("+cpu") else "pypi",
        "sha256": sha256(path),
        "size": path.stat().st_size,
        "licence": licence(meta["License-Expression"], meta["License"], meta.get_all("Classifier") or ()),
    }


def wheel_arch(file: str) -> str:
    """``x86_64``, ``aarch64`` ... or ``any``, from a wheel's file name."""
    platform = file.removesuffix(".whl").rsplit("-", 1)[1]
    match = re.search(r"x86_64|aarch64|i686", platform)
    return match.group() if match else "any"


def deb(path: Path) -> Entry:
    """Entry of a Debian package held on disk; its licence is the one of ``Files: *`` in its copyright file."""
    shown = subprocess.run(
        ["dpkg-deb", "--show", "--showformat=${Package}\n${Version}\n${Architecture}\n", path],
        check=True,
        capture_output=True,
        text=True,
    )
    name, version, arch = shown.stdout.split()
    return {
        "name": name,
        "version": version,
        "kind": "deb",
        "arch": arch,
        "file": path.name,
        "source": "debian bookworm",
        "sha256": sha256(path),
        "size": path.stat().st_size,
        "licence": deb_licence(path, name),
    }


def deb_licence(path: Path, name: str) -> str:
    """Licence short name from ``/usr/share/doc/NAME/copyright`` inside a package."""
    with tempfile.TemporaryFile() as data:
        subprocess.run(["dpkg-deb", "--fsys-tarfile", path], check=True, stdout=data)
        data.seek(0)
        with tarfile.open(fileobj=data) as archive:
            try:
                file = archive.extractfile(f"./usr/share/doc/{name}/copyright")
            except KeyError:
                return UNSTATED
            text = file.read().decode() if file else ""
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", paragraph, flags=re.MULTILINE))
        if fields.get("Files") == "*" and fields.get("License"):
            return str(fields["License"])
    return UNSTATED


def resolved(requirements: list[str]) -> list[Entry]:
    """Entries of the wheels that PyPI offers a Debian 12 target for some requirements; downloads metadata only.

    uv resolves them for the target, pip then names the one file it would install and what its metadata states. Must run
    under the target's Python version, because pip picks files for the interpreter it runs under.
    """
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        raise SystemExit(
            f"resolve picks wheels for Python {PYTHON} and must be run with it, not with {sys.version.split()[0]}"
        )
    # The digests must be those of PyPI, so the machine's own indexes and caps stay out.
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_F", "PIP_EXTRA", "PIP_INDEX", "UV_"))
    }
    env["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock, pins, report = (
            Path(folder) / name for name in ("wanted.in", "pylock.toml", "pins.txt", "report.json")
        )
        wanted.write_text("\n".join(requirements) + "\n")
        uv = [
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--python-version",
            PYTHON,
            "--python-platform",
            PLATFORM,
            "--only-binary",
            ":all:",
        ]
        uv += ["--default-index", "https://pypi.org/simple", "--format", "pylock.toml", "-o", str(lock), str(wanted)]
        subprocess.run(uv, check=True, env=env)
        packages = tomllib.loads(lock.read_text())["packages"]
        sizes = {w["hashes"]["sha256"]: w["size"] for package in packages for w in package["wheels"]}
        pins.write_text("".join(f"{package['name']}=={package['version']}\n" for package in packages))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        pip += [
            "--only-binary",
            ":all:",
            "--index-url",
            "https://pypi.org/simple",
            "--report",
            str(report),
            "-r",
            str(pins),
        ]
        subprocess.run(pip, check=True, env=env)
        installs = json.loads(report.read_text())["install"]
    return [_from_report(item, sizes) for item in installs]


def _from_report(item: Mapping[str, Any], sizes: Mapping[str, int]) -> Entry:
    meta, download = item["metadata"], item["download_info"]
    digest = download["archive_info"]["hashes"]["sha256"]
    file = unquote(urlsplit(download["url"]).path.rsplit("/", 1)[1])
    return {
        "name": normalise(meta["name"]),
        "version": meta["version"],
        "kind": "wheel",
        "arch": wheel_arch(file),
        "file": file,
        "source": "pypi",
        "sha256": digest,
        "size": sizes[digest],
        "licence": licence(meta.get("license_expression"), meta.get("license"), meta.get("classifier", ())),
    }


def main() -> None:
    """Entry point of ``python -m tools.artefacts``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="entries from wheels and Debian packages held on disk")
    add.add_argument("--set", required=True, dest="set_name")
    add.add_argument("paths", nargs="+", type=Path)
    resolve = commands.add_parser("resolve", help="entries for requirements, from PyPI's index")
    resolve.add_argument("--set", required=True, dest="set_name")
    resolve.add_argument("requirements", nargs="+")
    commands.add_parser("check", help="check the manifest")
    args = parser.parse_args()
    if args.command == "check":
        if found := _artefacts.problems(load()):
            raise SystemExit("\n".join(found))
        print(f"{MANIFEST.name}: {len(load()['artefacts'])} artefacts, complete and in order")
        return
    if args.command == "add":
        new = [deb(path) if path.suffix == ".deb" else wheel(path) for path in args.paths]
    else:
        new = resolved(args.requirements)
    save(merge(load(), args.set_name, new))
    print(f"{args.set_name}: {len(new)} artefacts")


if __name__ == "__main__":
    main()
