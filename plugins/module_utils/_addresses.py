# SPDX-License-Identifier: Apache-2.0
"""Who reaches whom, and where: the addresses of instances as other hosts see them. PRIVATE to the collection."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError
from ansible_collections.llmfleet.sglang.plugins.module_utils._wants import Instance, Wants


def bracketed(address: str) -> str:
    """An address as it stands in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_wildcard(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


def _family(address: str) -> int | None:
    """4 or 6; None of a name, which may have both."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return None


Member = tuple[Wants, Instance]


def group_members(fleet: Mapping[str, Wants], group: str, role: str) -> list[Member]:
    """The instances of a PD group in a fixed order, wherever they run: order of the inventory must not matter."""
    found = [
        (wants, instance)
        for wants in fleet.values()
        for instance in (*wants.instances, *wants.fallbacks)
        if instance.group == group and instance.role == role
    ]
    return sorted(found, key=lambda member: (member[0].host, member[1].name))


def advertised(member: Member, seen_from: str) -> str:
    """The host part under which ``seen_from`` reaches an instance. Raises RefusalError where it cannot."""
    wants, instance = member
    if is_loopback(instance.host):
        if wants.host != seen_from:
            raise RefusalError(
                "loopback",
                f"{instance.name} on {wants.host} listens on {instance.host}, and {seen_from} has to reach it",
                f"an address that {seen_from} can reach",
                f"set host of {instance.name} to the address of {wants.host} on the private network",
            )
        return instance.host
    if not is_wildcard(instance.host):
        return instance.host
    _check_family(member)
    return wants.address


def _check_family(member: Member) -> None:
    """A wildcard takes connections of its own family. ``::`` takes IPv4 as well, but not where an engine listens: its
    event loop asks the kernel for IPv6 alone."""
    wants, instance = member
    listens, told = _family(instance.host), _family(wants.address)
    if told in (None, listens) or (listens == 6 and not instance.is_engine):
        return
    raise RefusalError(
        "address_family",
        f"{instance.name} on {wants.host} listens on {instance.host}, and others are told {wants.address}",
        f"an IPv{listens} address to tell, or an IPv{told} address to listen on",
        f"set host of {instance.name} to the address that others are to reach, or plan_address of {wants.host} to an "
        f"IPv{listens} address",
    )


def own_ip(member: Member) -> str | None:
    """The address that a server tells others of itself; None on loopback, which nobody else reaches, and where only a
    name is known, which is none to listen on."""
    wants, instance = member
    address = wants.address if is_wildcard(instance.host) else instance.host
    return None if is_loopback(instance.host) or _family(address) is None else address


def metrics_port(instance: Instance) -> int:
    return instance.metrics_port or instance.port


def metrics_host(wants: Wants, instance: Instance, monitor: str) -> str:
    """Where an instance serves its metrics: an engine beside its API; a router, whose clients need no metrics, on
    loopback unless Prometheus runs elsewhere."""
    return "127.0.0.1" if instance.role == "router" and monitor == wants.host else instance.host


def url(member: Member, seen_from: str) -> str:
    return f"http://{bracketed(advertised(member, seen_from))}:{member[1].port}"


def local_address(address: str) -> str:
    """Where this host itself reaches what listens on an address: a wildcard is not one to connect to."""
    if not is_wildcard(address):
        return address
    return "::1" if ":" in address else "127.0.0.1"
