# SPDX-License-Identifier: Apache-2.0
"""The API keys of a unit: the credential ``api-keys`` (``LoadCredential=``), one key a line, the fleet's own first.

systemd puts it into a folder that only this unit's user can read, and gives the folder's name in CREDENTIALS_DIRECTORY.
"""

from __future__ import annotations

import os
from pathlib import Path

CREDENTIAL = "api-keys"


def read_api_keys() -> list[str]:
    """The unit's keys; none where it has no such credential. Raises OSError where it cannot be read."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(folder) / CREDENTIAL
    if not folder or not path.exists():
        return []
    return [line for line in path.read_text(encoding="ascii").splitlines() if line]
