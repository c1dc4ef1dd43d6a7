# SPDX-License-Identifier: Apache-2.0
"""The base image: a Debian 12 root directory that every host starts from, and the disk image virtual machines need.

An image is built from a `Recipe`, plain data that holds everything that can change the result, and lies under
``images/<hash of the recipe>``. It is built beside its final place and renamed when complete, so an image that
exists is whole. It contains the build machine's own package sources and CA certificates: never publish one.
"""

from __future__ import annotations

import configparser
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from testbed.layout import Layout
from testbed.shell import TestbedError, locked, require_programs, require_root, run, say, write_atomically

SUITE = "bookworm"
DEBIAN = "http://deb.debian.org/debian"
DEBIAN_SECURITY = "http://deb.debian.org/debian-security"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

# What hosts need, and what would be slow to install in each of them.
PACKAGES = (
    "acl",
    "ca-certificates",
    "curl",
    "dbus",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libgomp1",
    "linux-image-cloud-amd64",
    "nftables",
    "numactl",
    "openssh-server",
    "pciutils",
    "procps",
    "python3",
    "python3-apt",
    "python3-debian",
    "python3-venv",
    "sudo",
    "systemd-sysv",
    "udev",
    "zstd",
)

# Downloaded into the image's apt cache but not installed: a host without a network can then still install them.
OFFLINE_PACKAGES = ("haproxy", "libibverbs1", "prometheus", "prometheus-node-exporter")

# Timers that would do work of their own in the middle of a test, and units that make no sense in these hosts.
MASKED_UNITS = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "getty@tty1.service",
    "systemd-networkd-wait-online.service",
)

# A virtual machine's address on the network between virtual machines comes from its kernel command line.
VM_LAN = """\
#!/bin/sh
# Turn llmfleet.lan=ADDRESS/LENGTH on the kernel command line into the address of lan0.
for word in $(cat /proc/cmdline); do
  case $word in llmfleet.lan=*)
    mkdir -p /run/systemd/network
    printf '[Match]\\nName=lan0\\n[Network]\\nAddress=%s\\nLinkLocalAddressing=no\\nIPv6AcceptRA=no\\n' \\
      "${word#llmfleet.lan=}" > /run/systemd/network/20-lan.network ;;
  esac
done
"""

VM_LAN_UNIT = """\
[Unit]
Description=Address of the network between virtual machines
ConditionKernelCommandLine=llmfleet.lan
DefaultDependencies=no
After=local-fs.target
Before=systemd-networkd.service
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/llmfleet-vm-lan
[Install]
WantedBy=sysinit.target
"""

FILES = {
    # For virtual machines; an nspawn host gets its own.
    "/etc/fstab": (
        "LABEL=root / ext4 defaults,noatime 0 1\n"
        "LABEL=stand-ins /opt/llmfleet-testbed ext4 ro,nofail,x-systemd.device-timeout=300 0 0\n"
    ),
    "/etc/hostname": "testbed\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/ssh/sshd_config.d/10-testbed.conf": "UseDNS no\nGSSAPIAuthentication no\n",
    "/etc/sudoers.d/ansible": "ansible ALL=(ALL) NOPASSWD:ALL\n",
    "/etc/systemd/network/10-wan.network": (
        "[Match]\nName=wan0\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\nDNS=10.0.2.3\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    "/etc/systemd/system/llmfleet-vm-lan.service": VM_LAN_UNIT,
    "/etc/udev/rules.d/70-testbed.rules": (
        'SUBSYSTEM=="net", ACTION=="add", ATTR{address}=="52:54:00:aa:*", NAME="wan0"\n'
        'SUBSYSTEM=="net", ACTION=="add", ATTR{address}=="52:54:00:bb:*", NAME="lan0"\n'
    ),
    "/usr/local/sbin/llmfleet-vm-lan": VM_LAN,
}
MODES = {"/etc/sudoers.d/ansible": 0o440, "/usr/local/sbin/llmfleet-vm-lan": 0o755}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the image contains, except the versions the archive serves on the day.

    ``mirrors`` maps a suite to its URI; ``ca_certificates`` a file name to PEM text; ``files`` a path in the image
    to its text.
    """

    mirrors: Mapping[str, str]
    apt_options: str
    pip_config: str
    environment: str
    ca_certificates: Mapping[str, str]
    authorized_key: str
    suite: str = SUITE
    packages: tuple[str, ...] = PACKAGES
    offline_packages: tuple[str, ...] = OFFLINE_PACKAGES
    masked_units: tuple[str, ...] = MASKED_UNITS
    files: Mapping[str, str] = field(default_factory=lambda: dict(FILES))
    steps: int = 1  # raise it when `_configure` changes in a way that the fields above do not show

    @property
    def id(self) -> str:
        """Hash of the recipe: the name of the image that it makes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def apt_mirrors(sources: Mapping[str, str]) -> dict[str, str]:
    """URI of each Debian suite that the image needs, read from this machine's apt sources (file name -> text).

    Understands one-line ``.list`` and deb822 ``.sources`` files; suites not found there (an Ubuntu machine) are
    taken from Debian's own servers.
    """
    found: dict[str, str] = {}
    for name, text in sources.items():
        if name.endswith(".sources"):
            for stanza in re.split(r"\n\s*\n", text):
                keys = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.+)$", stanza, flags=re.MULTILINE))
                if "deb" in keys.get("Types", "").split() and keys.get("Enabled", "yes") != "no":
                    for suite in keys.get("Suites", "").split():
                        found.setdefault(suite, keys.get("URIs", "").split()[0])
        else:
            for uri, suite in re.findall(r"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", text, flags=re.MULTILINE):
                found.setdefault(suite, uri)
    defaults = {SUITE: DEBIAN, f"{SUITE}-updates": DEBIAN, f"{SUITE}-security": DEBIAN_SECURITY}
    return {suite: found.get(suite, uri) for suite, uri in defaults.items()}


def apt_options(dump: str) -> str:
    """The part of ``apt-config dump`` that says how to reach the archive: proxies, TLS, retries, clock checks."""
    wanted = re.compile(r"Acquire::(https?::|ftp::|Retries|Check-Valid-Until|Check-Date|Max-ValidTime|ForceIPv4)")
    return "".join(f"{line}\n" for line in dump.splitlines() if wanted.match(line) and not line.endswith(' "";'))


def pip_config(texts: list[str]) -> str:
    """A pip.conf for hosts from this machine's own: what says how to reach the index, without local directories."""
    found: dict[str, str] = {}
    for text in texts:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
        except configparser.Error as error:
            raise TestbedError(f"this machine's pip configuration cannot be parsed: {error}") from error
        if parser.has_section("global"):
            found.update(parser.items("global"))
    lines = ["[global]", "disable-pip-version-check = 1"]
    for key in ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout"):
        values = [v for v in found.get(key, "").split() if not v.startswith(("file:", "/"))]
        if values:
            lines.append(f"{key} = {' '.join(values)}")
    if "cert" in found:
        lines.append(f"cert = {CA_BUNDLE}")
    return "\n".join(lines) + "\n"


def host_environment(environment: Mapping[str, str]) -> str:
    """/etc/environment for hosts: proxies as they are, and CA bundle variables pointing to the host's own bundle."""
    proxies = ("http_proxy", "https_proxy", "no_proxy")
    lines = [f"{key}={value}" for key, value in sorted(environment.items()) if key.lower() in proxies]
    for key in ("CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        if key in environment:
            lines.append(f"{key}={CA_BUNDLE}")
    return "".join(f"{line}\n" for line in lines)


def recipe(layout: Layout) -> Recipe:
    """The recipe for this machine; makes the ssh key on first use."""
    if not layout.ssh_key.exists():
        require_programs("ssh-keygen")
        layout.root.mkdir(parents=True, exist_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "llmfleet-testbed", "-f", str(layout.ssh_key)])
    lists = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    pip_files = [Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf"]
    certificates = sorted(Path("/usr/local/share/ca-certificates").rglob("*.crt"))
    sources = {p.name: p.read_text() for p in lists if p.suffix in (".list", ".sources") and p.is_file()}
    return Recipe(
        mirrors=apt_mirrors(sources),
        apt_options=apt_options(run(["apt-config", "dump"]).stdout),
        pip_config=pip_config([p.read_text() for p in pip_files if p.is_file()]),
        environment=host_environment(os.environ),
        ca_certificates={p.name: p.read_text() for p in certificates},
        authorized_key=layout.ssh_key.with_suffix(".pub").read_text(),
    )


@dataclass(frozen=True)
class Image:
    """A finished image. ``rootfs`` is for nspawn; the other three exist once `ensure_disk` has made them."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def rootfs(self) -> Path:
        return self.path / "rootfs"

    @property
    def disk(self) -> Path:
        return self.path / "base.raw"

    @property
    def kernel(self) -> Path:
        return self.path / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.path / "initrd.img"


def ensure(layout: Layout) -> tuple[Image, bool]:
    """The image of this machine's recipe, built if there is none yet; and whether it had to be built."""
    require_root()
    with locked(layout.lock("image")):
        wanted = recipe(layout)
        image = Image(layout.images / wanted.id)
        if image.path.is_dir():
            return image, False
        require_programs("debootstrap", "chroot", "mount", "dpkg-deb")
        if not Path(KEYRING).exists():
            raise TestbedError(f"{KEYRING} is missing; install it with: apt-get install debian-archive-keyring")
        building = layout.images / f".building-{wanted.id}"
        _remove_tree(building)
        building.mkdir(parents=True)
        _build(layout, wanted, building)
        (building / "recipe.json").write_text(json.dumps(asdict(wanted), indent=1, sort_keys=True))
        building.rename(image.path)
        return image, True


def ensure_disk(layout: Layout, image: Image) -> None:
    """Make the raw ext4 disk, kernel and initrd for virtual machines from the image's root directory."""
    with locked(layout.lock("image")):
        if image.disk.exists():
            return
        require_programs("mke2fs")
        say("making the disk image for virtual machines")
        for target, link in ((image.kernel, "vmlinuz"), (image.initrd, "initrd.img")):
            source = image.rootfs / os.readlink(image.rootfs / link)
            write_atomically(target, source.read_bytes())
        unfinished = image.path / ".base.raw"
        unfinished.unlink(missing_ok=True)
        run(["mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", str(image.rootfs), str(unfinished), "16G"])
        unfinished.chmod(0o444)
        unfinished.rename(image.disk)


def remove(layout: Layout, keep: set[str]) -> None:
    """Remove every image whose id is not in ``keep``; packages in ``debs`` and the ssh key stay."""
    with locked(layout.lock("image")):
        for path in [*layout.images.glob("*"), *layout.images.glob(".building-*")]:
            if path.is_dir() and path.name not in keep:
                _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Remove a root directory, refusing to reach through anything still mounted below it."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in sorted((m for m in mounted if m.startswith(f"{path}/")), reverse=True):
        run(["umount", point])
    if path.exists():
        shutil.rmtree(path)


@contextlib.contextmanager
def _chroot_mounts(root: Path) -> Iterator[None]:
    """/proc in the chroot, which package scripts expect; and a policy that lets none of them start a service."""
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    run(["mount", "-t", "proc", "proc", str(root / "proc")])
    try:
        yield
    finally:
        run(["umount", str(root / "proc")])
        policy.unlink()


def _build(layout: Layout, wanted: Recipe, building: Path) -> None:
    root, log = building / "rootfs", layout.images / f"build-{wanted.id}.log"
    log.unlink(missing_ok=True)
    cache = layout.debs / "debootstrap"
    cache.mkdir(parents=True, exist_ok=True)
    say(f"image {wanted.id}: debootstrap of Debian {wanted.suite} from {wanted.mirrors[wanted.suite]} (log: {log})")
    run(
        [
            "debootstrap",
            "--variant=minbase",
            "--arch=amd64",
            f"--keyring={KEYRING}",
            f"--cache-dir={cache}",
            f"--include={','.join(wanted.packages)}",
            wanted.suite,
            str(root),
            wanted.mirrors[wanted.suite],
        ],
        log=log,
    )
    # debootstrap links packages from its cache; without this apt's own cleaning would be the only thing to drop them.
    for archive in (root / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    _configure(layout, wanted, root, log)
    _release_tarball(layout, root)


def _configure(layout: Layout, wanted: Recipe, root: Path, log: Path) -> None:
    def in_root(*argv: str) -> None:
        run(["chroot", str(root), *argv], log=log, env={"DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"})

    def put(path: str, text: str, mode: int = 0o644) -> None:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(text)
        target.chmod(mode)

    stanzas = [
        f"Types: deb\nURIs: {uri}\nSuites: {suite}\n"
        f"Components: main contrib non-free non-free-firmware\nSigned-By: {KEYRING}\n"
        for suite, uri in wanted.mirrors.items()
    ]
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    put("/etc/apt/sources.list.d/debian.sources", "\n".join(stanzas))
    put("/etc/apt/apt.conf.d/90testbed", wanted.apt_options + 'APT::Install-Recommends "false";\n')
    put("/etc/pip.conf", wanted.pip_config)
    put("/etc/environment", wanted.environment)
    for name, pem in wanted.ca_certificates.items():
        put(f"/usr/local/share/ca-certificates/{name}", pem)
    put("/etc/resolv.conf", Path("/etc/resolv.conf").read_text())

    say("security updates, and packages for offline installation")
    archives = layout.debs / "apt"
    archives.mkdir(parents=True, exist_ok=True)
    with _chroot_mounts(root):
        in_root("update-ca-certificates")
        for archive in archives.glob("*.deb"):
            shutil.copy2(archive, root / "var/cache/apt/archives" / archive.name)
        in_root("apt-get", "-q", "update")
        in_root("apt-get", "-qy", "dist-upgrade")
        in_root("apt-get", "-qy", "autoremove", "--purge")
        in_root("apt-get", "-qy", "install", "--download-only", "--no-install-recommends", *wanted.offline_packages)
        for archive in (root / "var/cache/apt/archives").glob("*.deb"):
            shutil.copy2(archive, archives / archive.name)
        # Of all that is cached keep only what the offline packages need: the image should stay small.
        in_root("apt-get", "clean")
        uris = run(
            ["chroot", str(root), "apt-get", "-qy", "--print-uris", "install", *wanted.offline_packages],
            env={"DEBIAN_FRONTEND": "noninteractive"},
        ).stdout
        for name in re.findall(r"^'[^']+' (\S+\.deb) ", uris, flags=re.MULTILINE):
            shutil.copy2(archives / name, root / "var/cache/apt/archives" / name)
        in_root("useradd", "--create-home", "--shell", "/bin/bash", "ansible")
        for home, owner in (("/root", "root"), ("/home/ansible", "ansible")):
            put(f"{home}/.ssh/authorized_keys", wanted.authorized_key, 0o600)
            (root / home.lstrip("/") / ".ssh").chmod(0o700)
            in_root("chown", "-R", f"{owner}:{owner}", f"{home}/.ssh")
        for path, text in wanted.files.items():
            put(path, text, MODES.get(path, 0o644))
        in_root("systemctl", "enable", "systemd-networkd", "llmfleet-vm-lan", "ssh")
        in_root("systemctl", "mask", *wanted.masked_units)
    put("/etc/resolv.conf", "nameserver 10.0.2.3\n")
    # An empty machine id makes each host take its own at its first boot.
    put("/etc/machine-id", "")
    (root / "var/lib/dbus/machine-id").unlink(missing_ok=True)
    for point in ("/opt/llmfleet-testbed", *(f"/var/cache/llmfleet/{name}" for name in ("wheels", "dist", "models"))):
        (root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)


def _release_tarball(layout: Layout, root: Path) -> None:
    """Repack Debian's prometheus the way the project's own release tarballs look, with the digest beside it.

    The same packages always give the same bytes: sorted members, no times, no owners.
    """
    archives = sorted((root / "var/cache/apt/archives").glob("prometheus_*.deb"))
    if not archives:
        raise TestbedError(f"no prometheus package was downloaded into {root}/var/cache/apt/archives")
    version = re.sub(r"^prometheus_([0-9.]+).*$", r"\1", archives[-1].name)
    top = f"prometheus-{version}.linux-amd64"
    package = subprocess.check_output(["dpkg-deb", "--fsys-tarfile", str(archives[-1])])
    plain = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(package)) as source, tarfile.open(fileobj=plain, mode="w") as release:
        for program in ("prometheus", "promtool"):
            content = source.extractfile(f"./usr/bin/{program}")
            if content is None:
                raise TestbedError(f"{archives[-1].name} has no /usr/bin/{program}")
            data = content.read()
            member = tarfile.TarInfo(f"{top}/{program}")
            member.size, member.mode = len(data), 0o755
            release.addfile(member, io.BytesIO(data))
    packed = gzip.compress(plain.getvalue(), compresslevel=1, mtime=0)
    name = f"{top}.tar.gz"
    write_atomically(layout.dist / name, packed)
    write_atomically(layout.dist / f"{name}.sha256", f"{hashlib.sha256(packed).hexdigest()}  {name}\n")
    say(f"made {layout.dist / name}")
