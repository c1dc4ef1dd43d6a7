# SPDX-License-Identifier: Apache-2.0
"""Stand-in for a CUDA runtime, so that SGLang's CUDA build imports and serves prefill and decode on a CPU.

Put this directory on PYTHONPATH of the engine: Python imports ``sitecustomize`` by itself when it starts, in the
engine's child processes too, and finds ``sgl_kernel`` beside it. Nothing happens until the modules named below are
imported, and nothing at all where PyTorch has a CUDA device.

- torchvision from PyPI is built for CUDA and registers shape functions for operators that its own library defines;
  beside a CPU torch that library does not load, and the import dies of the missing operators.
- The disaggregation code of the engine pins host memory and records CUDA events around a transfer, whatever the
  device is. Pinning becomes nothing, and an event is always complete: on a CPU the work before it is done when the
  call returns.

What it does not stand for: kernels, streams that run beside each other, device memory. A call of any other CUDA
function still fails the way it does without a driver.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

_FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
_kept: list[object] = []  # a torch library's definitions go away with the object


class _FinishedEvent:
    """A torch.cuda.Event or Stream on which there is never anything to wait for."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def record(self, *_args: object, **_kwargs: object) -> None: ...

    def wait(self, *_args: object, **_kwargs: object) -> None: ...

    def wait_event(self, *_args: object) -> None: ...

    def wait_stream(self, *_args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0


def _define_torchvision_operators() -> None:
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def unpinned(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return unpinned


def _replace_cuda_synchronisation() -> None:
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_available():
        return
    for name in _FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    torch.cuda.Event = _FinishedEvent
    torch.cuda.current_stream = lambda *_args, **_kwargs: _FinishedEvent()


class _BeforeFirstImport(importlib.abc.MetaPathFinder):
    """Runs an action when a module is about to be imported for the first time, and leaves finding it to others."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        action = self.actions.pop(fullname, None)
        if action is not None:
            action()


sys.meta_path.insert(
    0,
    _BeforeFirstImport({"sglang.srt": _replace_cuda_synchronisation, "torchvision": _define_torchvision_operators}),
)
