# SPDX-License-Identifier: Apache-2.0
"""Running programs, waiting with a deadline, locking, and the one error this tool raises."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Program -> Debian/Ubuntu package that brings it; named in the message when the program is missing.
PACKAGES = {
    "chroot": "coreutils",
    "debootstrap": "debootstrap",
    "dpkg-deb": "dpkg",
    "gcc": "gcc libc6-dev",
    "ip": "iproute2",
    "mke2fs": "e2fsprogs",
    "mount": "mount",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "systemd-nspawn": "systemd-container",
    "unshare": "util-linux",
}

_STARTED = time.monotonic()


class TestbedError(Exception):
    """Something the operator can act on: the message says what was found and what to do."""

    __test__ = False  # not a test class, whatever pytest thinks of the name


def say(message: str) -> None:
    """Print one progress line to stderr, with the seconds since the tool started."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {message}", file=sys.stderr, flush=True)


def require_root() -> None:
    """Refuse to go on without root."""
    if os.geteuid() != 0:
        raise TestbedError("this command needs root (it mounts, chroots and boots hosts): run it with sudo -E")


def require_programs(*names: str) -> None:
    """Refuse to go on when one of the programs is not on PATH, naming the packages that bring them."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in names if shutil.which(name, path=search) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES.get(name, name) for name in missing}))
        raise TestbedError(f"missing programs: {', '.join(missing)}; install them with: apt-get install {packages}")


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a text file, or a note that there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return f"({path} does not exist)"
    return "\n".join(text.splitlines()[-lines:])


def run(
    argv: Sequence[str],
    *,
    log: Path | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    text_in: str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it printed.

    With ``log`` its output is appended there instead (stdout of the result is then empty). A non-zero exit raises
    `TestbedError` with the end of the output, unless ``check`` is false; more than ``timeout`` seconds always do.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    environment.update(env or {})
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("a")) if log else None
        try:
            done = subprocess.run(
                list(argv),
                input=text_in,
                stdin=subprocess.DEVNULL if text_in is None else None,
                stdout=sink or subprocess.PIPE,
                stderr=subprocess.STDOUT if sink else subprocess.PIPE,
                env=environment,
                text=True,
                timeout=timeout,
                check=False,
            )
        except FileNotFoundError:
            require_programs(argv[0])
            raise
        except subprocess.TimeoutExpired as error:
            raise TestbedError(f"{' '.join(argv)} was not done after {timeout} s") from error
    if check and done.returncode != 0:
        output = tail(log) if log else f"{done.stdout}{done.stderr}".strip()
        raise TestbedError(f"{' '.join(argv)} failed with status {done.returncode}:\n{output}")
    return done


def wait_until(
    condition: Callable[[], bool],
    what: str,
    *,
    seconds: float,
    interval: float = 0.2,
    explain: Callable[[], str] | None = None,
) -> float:
    """Poll ``condition`` until it holds; return the seconds it took.

    Prints a progress line every ten seconds. After ``seconds`` raises `TestbedError`, with ``explain()`` (the tail
    of a console log, say) added to the message.
    """
    start = time.monotonic()
    next_note = start + 10
    while not condition():
        now = time.monotonic()
        if now - start > seconds:
            detail = f"\n{explain()}" if explain else ""
            raise TestbedError(f"{what}: not so after {seconds:.0f} s{detail}")
        if now > next_note:
            say(f"still waiting: {what} ({now - start:.0f} of at most {seconds:.0f} s)")
            next_note = now + 10
        time.sleep(interval)
    return time.monotonic() - start


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file; a second command that wants it waits and says for whom."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"waiting for process {file.read().strip() or 'unknown'}, which holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def write_atomically(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader sees either the old content or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.chmod(mode)
    temporary.replace(path)
