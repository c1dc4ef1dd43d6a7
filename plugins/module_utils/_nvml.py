# SPDX-License-Identifier: Apache-2.0
"""What NVML says about a host's GPUs, asked through an interpreter that has nvidia-ml-py. PRIVATE to the collection.

Ansible's own interpreter on a host has the standard library only, so a child process asks: the engine's virtual
environment brings nvidia-ml-py. A child can also be left behind when the driver does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import TopologyError, normalise_pci

WORD_BITS = 64
# How long a child that was killed may take to go; one that waits in the driver goes when the driver lets it.
KILL_SECONDS = 2
LAST_WORDS = 500

# Runs in the child: prints one JSON document as its last line. Each question is asked on its own, since a GPU may
# answer one and not the other, and nvidia-ml-py or the library may be too old to know a question. The sets are words
# of 64 bits, large enough for every CPU (8192) and node (1024) that a kernel is built for.
PROGRAM = """
import json
import sys


def ask(function, *arguments, field=None):
    try:
        value = getattr(pynvml, function)(*arguments)
        value = getattr(value, field) if field else value
        return value.decode(errors="replace") if isinstance(value, bytes) else value
    except Exception:
        return None


def words(function, *arguments):
    return [int(word) for word in ask(function, *arguments) or []]


def about(index):
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return {}
    return {
        "pci": ask("nvmlDeviceGetPciInfo", handle, field="busId"),
        "uuid": ask("nvmlDeviceGetUUID", handle),
        "name": ask("nvmlDeviceGetName", handle),
        "memory_total": ask("nvmlDeviceGetMemoryInfo", handle, field="total"),
        "memory_affinity": words("nvmlDeviceGetMemoryAffinity", handle, 16, 0),
        "cpu_affinity": words("nvmlDeviceGetCpuAffinity", handle, 128),
        "numa_node": ask("nvmlDeviceGetNumaNodeId", handle),
        "capability": ask("nvmlDeviceGetCudaComputeCapability", handle),
    }


try:
    import pynvml

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
driver = ask("nvmlSystemGetDriverVersion")
print("\\n" + json.dumps([{**about(index), "driver": driver} for index in range(count)]))
"""


class NvmlError(Exception):
    """NVML could not be asked."""


def read_nvml(python: str, environment: Mapping[str, str] | None = None, timeout_s: float = 30) -> list[dict[str, Any]]:
    """What NVML says, one entry for each GPU that it counts, in its own order.

    ``{pci, uuid, name, memory_total, memory_affinity[], cpu_affinity[], numa_node, capability, driver}``: the PCI
    address as sysfs writes it, bytes, ids of nodes, CPUs, NVML's own NUMA id of the GPU, and its compute capability
    such as "9.0". What NVML does not answer is None or []; a GPU that is lost answers nothing at all.

    ``python`` is the interpreter that has nvidia-ml-py, ``environment`` is added to this process's own. Raises
    NvmlError where the interpreter, nvidia-ml-py, the library or the driver is missing, and where there is no answer
    after ``timeout_s``.
    """
    # -I: nothing is imported from the working directory or from PYTHONPATH. A session of its own, so that whatever the
    # interpreter has started ends with it.
    command = [python, "-I", "-c", PROGRAM]
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise NvmlError(f"cannot run {python}: {error.strerror}. Expected a Python that has nvidia-ml-py.") from error
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        _end(child)
        raise NvmlError(
            f"NVML did not answer {python} within {timeout_s:g} s. The driver may be stuck: try nvidia-smi, look for "
            "NVRM in the kernel's log."
        ) from error
    if child.returncode != 0:
        said = " ".join(err.decode(errors="replace").split())[-LAST_WORDS:]
        raise NvmlError(
            f"{python} cannot ask NVML (exit status {child.returncode}): {said or 'it said nothing'}. Expected "
            "nvidia-ml-py in this Python's environment, libnvidia-ml.so.1 and a loaded driver of the same version."
        )
    return parse(out.decode(errors="replace"))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it has started, without waiting for one that the kernel does not let go."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=KILL_SECONDS)


def parse(out: str) -> list[dict[str, Any]]:
    """The entries of ``read_nvml`` from what the child printed; what is before its last line is a library's chatter."""
    lines = out.strip().splitlines()
    try:
        entries = json.loads(lines[-1] if lines else "")
    except ValueError as error:
        raise NvmlError(f"the child that asks NVML printed {out[-LAST_WORDS:]!r}: expected JSON") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise NvmlError(f"the child that asks NVML printed {out[-LAST_WORDS:]!r}: expected a list of GPUs")
    return [_entry(entry) for entry in entries]


def _entry(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pci": _pci(raw.get("pci")),
        "uuid": _text(raw.get("uuid")),
        "name": _text(raw.get("name")),
        "memory_total": _whole(raw.get("memory_total"), 1),
        "memory_affinity": members(raw.get("memory_affinity")),
        "cpu_affinity": members(raw.get("cpu_affinity")),
        # A GPU without a node of its own says that it does not support the question, or -1.
        "numa_node": _whole(raw.get("numa_node"), 0),
        "capability": _capability(raw.get("capability")),
        "driver": _text(raw.get("driver")),
    }


def members(words: Any) -> list[int]:
    """The members of a set that NVML writes as words of 64 bits, the lowest first: ``[6, 1]`` -> ``[1, 2, 64]``.

    [] for what is no such set. A word is unsigned, and read as such where a binding made it negative.
    """
    if not isinstance(words, Sequence) or not all(isinstance(word, int) for word in words):
        return []
    return [
        position * WORD_BITS + bit for position, word in enumerate(words) for bit in range(WORD_BITS) if word >> bit & 1
    ]


def merge(gpus: Sequence[Mapping[str, Any]], nvml: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The GPUs of sysfs, each with what NVML says of it as ``nvml`` (None where NVML does not know it)."""
    by_address = {entry["pci"]: dict(entry) for entry in nvml if entry["pci"] is not None}
    return [{**gpu, "nvml": by_address.get(gpu["pci"])} for gpu in gpus]


def _whole(value: Any, least: int) -> int | None:
    # NVML writes "not available" as the largest unsigned number.
    return value if isinstance(value, int) and least <= value < 2**63 else None


def _capability(value: Any) -> str | None:
    """``[9, 0]`` as NVML answers -> ``"9.0"``."""
    pair = isinstance(value, list) and len(value) == 2 and all(_whole(number, 0) is not None for number in value)
    return f"{value[0]}.{value[1]}" if pair else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _pci(value: Any) -> str | None:
    try:
        return normalise_pci(value) if isinstance(value, str) else None
    except TopologyError:
        return None
