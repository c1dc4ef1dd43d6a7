# SPDX-License-Identifier: Apache-2.0
"""Where the testbed keeps its state, and how a host's index becomes an address, a port and a MAC."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.shell import TestbedError

BRIDGE = "llmfleet0"
BRIDGE_ADDRESS = "10.88.0.1"
_MAC_BYTE = {"wan": "aa", "lan": "bb"}
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")


@dataclass(frozen=True)
class Layout:
    """Paths on the build machine. ``root`` holds everything the testbed makes, ``cache`` what it shares with others."""

    root: Path
    cache: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Layout:
        """LLMFLEET_TESTBED_DIR, else LLMFLEET_CACHE/testbed, else ~/.cache/llmfleet/testbed."""
        home = Path(environment.get("HOME") or "/root")
        cache = Path(environment.get("LLMFLEET_CACHE") or home / ".cache" / "llmfleet").absolute()
        root = Path(environment.get("LLMFLEET_TESTBED_DIR") or cache / "testbed").absolute()
        return cls(root=root, cache=cache)

    @property
    def ssh_key(self) -> Path:
        return self.root / "id_ed25519"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def debs(self) -> Path:
        """Packages that debootstrap and apt downloaded, kept to make a rebuild fast."""
        return self.root / "debs"

    @property
    def dist(self) -> Path:
        """Release tarballs, seen by hosts at /var/cache/llmfleet/dist."""
        return self.root / "dist"

    @property
    def stand_ins(self) -> Path:
        """Built copy of testbed/stand_ins, seen by hosts at /opt/llmfleet-testbed."""
        return self.root / "stand_ins"

    @property
    def node_tree(self) -> Path:
        return self.stand_ins / "node_tree" / "tree"

    @property
    def wheels(self) -> Path:
        return self.cache / "wheels"

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def hosts(self) -> Path:
        return self.root / "hosts"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    def lock(self, what: str) -> Path:
        return self.root / "locks" / what


def check_name(name: str) -> str:
    """A host name: lower case letters, digits and dashes, at most 32 characters."""
    if not _NAME.fullmatch(name):
        raise TestbedError(f"host name {name!r}: expected lower case letters, digits and dashes, a letter first")
    return name


def check_tag(tag: str) -> str:
    """A snapshot's tag: letters, digits, dots, dashes, underscores."""
    if not _TAG.fullmatch(tag):
        raise TestbedError(f"snapshot tag {tag!r}: expected letters, digits, dots, dashes and underscores")
    return tag


def check_index(index: int) -> int:
    """Indexes are 2..254: they are the last byte of an address, and 1 is the bridge."""
    if not 2 <= index <= 254:
        raise TestbedError(f"host index {index}: expected 2 to 254")
    return index


def nspawn_address(index: int) -> str:
    """Address of an nspawn host on the bridge."""
    return f"10.88.0.{check_index(index)}"


def vm_lan_address(index: int) -> str:
    """Address of a virtual machine on the network that only virtual machines are on."""
    return f"10.77.0.{check_index(index)}"


def ssh_port(index: int) -> int:
    """Port on 127.0.0.1 at which a host without its own address answers ssh."""
    return 22000 + check_index(index)


def mac(network: str, index: int) -> str:
    """MAC of a virtual machine's interface; ``network`` is ``wan`` (slirp) or ``lan``."""
    return f"52:54:00:{_MAC_BYTE[network]}:00:{check_index(index):02x}"


def machine_id(name: str) -> str:
    """A machine id that a host keeps over resets and shares with no other name."""
    return hashlib.sha256(f"llmfleet testbed {name}".encode()).hexdigest()[:32]
