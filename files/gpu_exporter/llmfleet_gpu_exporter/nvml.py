# SPDX-License-Identifier: Apache-2.0
"""The only door to NVML: `nvidia-ml-py` with its errors sorted by whom they concern, and strings that always decode.

Not thread-safe on purpose: the collector's thread is the only caller.
"""

from __future__ import annotations

import _ctypes
import contextlib
import importlib
from typing import Any, NewType

Handle = NewType("Handle", object)


class LibraryError(Exception):
    """NVML as a whole does not answer. `reason` is NVML's name of the error, in lower case."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GpuLostError(Exception):
    """This GPU does not answer anything any more."""


class UnansweredError(Exception):
    """This one question has no answer for this GPU: not supported, not in this library, or not readable."""


# Errors after which nothing else can be asked of the library, and of the GPU.
_LIBRARY_ERRORS = frozenset({"uninitialized", "driver_not_loaded", "library_not_found", "lib_rm_version_mismatch"})
_GPU_ERRORS = frozenset({"gpu_is_lost", "reset_required", "gpu_not_found"})


class Nvml:
    """One loaded and initialised NVML. Methods raise LibraryError, GpuLostError or UnansweredError and nothing else."""

    def __init__(self) -> None:
        # Without type information, and absent where only the pure parts are used.
        self._pynvml: Any = importlib.import_module("pynvml")
        self._error_names = {
            value: name.removeprefix("NVML_ERROR_").lower()
            for name, value in vars(self._pynvml).items()
            if name.startswith("NVML_ERROR_")
        }
        self.is_open = False

    def open(self) -> None:
        """Loads and initialises the library. Raises LibraryError."""
        try:
            self.call("nvmlInit")
        except (GpuLostError, UnansweredError) as error:
            raise LibraryError(str(error)) from error
        self.is_open = True

    def close(self) -> None:
        """Shuts the library down, whatever state it is in; it stays loaded."""
        self.is_open = False
        if self._pynvml.nvmlLib is None:
            return
        # It may not be initialised, or be past answering.
        with contextlib.suppress(LibraryError, GpuLostError, UnansweredError):
            self.call("nvmlShutdown")

    def unload(self) -> None:
        """Closes the library and lets go of its file, so that the next `open` takes the one then installed.

        Otherwise a version mismatch after a driver upgrade would last as long as this process has the old file mapped.
        """
        self.close()
        library = self._pynvml.nvmlLib
        if library is not None:
            self._pynvml._nvmlGetFunctionPointer_cache.clear()
            self._pynvml.nvmlLib = None
            _ctypes.dlclose(library._handle)

    def call(self, function: str, *arguments: object) -> Any:
        """Calls a function of nvidia-ml-py by name. Text comes back as str, bad UTF-8 replaced."""
        try:
            wrapped = getattr(self._pynvml, function)
            # The wrapper of functions that return text decodes strictly; what it wraps returns the bytes.
            answer = getattr(wrapped, "__wrapped__", wrapped)(*arguments)
        except self._pynvml.NVMLError as error:
            name = self._error_names.get(error.value, f"error_{error.value}")
            if name in _LIBRARY_ERRORS:
                raise LibraryError(name) from error
            if name in _GPU_ERRORS:
                raise GpuLostError(name) from error
            raise UnansweredError(name) from error
        except Exception as error:  # whatever a binding of another version may do, it concerns this question only
            raise UnansweredError(f"{type(error).__name__}: {error}") from error
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer

    def constant(self, name: str) -> object:
        """A constant of nvidia-ml-py. Raises UnansweredError when it has none of that name."""
        try:
            return getattr(self._pynvml, name)
        except AttributeError as error:
            raise UnansweredError(f"nvidia-ml-py has no {name}") from error

    def count(self) -> int:
        """Number of GPUs that NVML counts, lost ones included. Raises LibraryError."""
        try:
            return int(self.call("nvmlDeviceGetCount"))
        except (GpuLostError, UnansweredError) as error:
            raise LibraryError(str(error)) from error

    def handle(self, index: int) -> Handle:
        return Handle(self.call("nvmlDeviceGetHandleByIndex", index))
