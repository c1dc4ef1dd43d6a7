# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the CUDA kernel package ``sgl_kernel``, whose libraries cannot be loaded without the NVIDIA driver.

The engine imports many names from it, and on a CPU calls none: there it takes its own PyTorch paths. So every name
can be imported, and a call fails with the error an operator would get for a kernel that was not built.
"""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing_kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version")

    missing_kernel.__name__ = name
    return missing_kernel
