# SPDX-License-Identifier: Apache-2.0
"""Prometheus exporter for NVIDIA GPUs: NVML read by one thread, /metrics rendered from its last snapshot."""

from __future__ import annotations

__version__ = "0.1.0"
