# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the decode step of DeepSeek-V4 for SGLang, one module a kernel."""

from __future__ import annotations

__version__ = "0.1.0"
