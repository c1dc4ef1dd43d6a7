# SPDX-License-Identifier: Apache-2.0
"""What cannot be accepted, told so that a person can act on it. PRIVATE to the collection."""

from __future__ import annotations


class RefusalError(Exception):
    """One thing that cannot be accepted, with all that a person needs: found, expected, cure."""

    def __init__(self, code: str, found: str, expected: str, cure: str) -> None:
        super().__init__(f"{found}; expected {expected}")
        self.code, self.found, self.expected, self.cure = code, found, expected, cure

    def on(self, host: str) -> dict[str, str]:
        """The refusal as data, of a host."""
        return {"code": self.code, "host": host, "found": self.found, "expected": self.expected, "cure": self.cure}
