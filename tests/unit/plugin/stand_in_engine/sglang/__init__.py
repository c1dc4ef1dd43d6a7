# SPDX-License-Identifier: Apache-2.0
"""Stand-in for SGLang: only its plugin loader, and a scheduler to hook. Not the engine."""
