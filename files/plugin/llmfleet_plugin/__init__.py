# SPDX-License-Identifier: Apache-2.0
"""Features for SGLang that need no patch, loaded through its entry point ``sglang.srt.plugins``.

SGLang loads a plugin in every process it starts (server, schedulers, in 0.5.23 also detokenizer and data-parallel
controller), catches whatever the plugin raises, logs it, and goes on with the stock engine. A server that silently
lacks what it was planned with is worse than one that does not start, so ``load`` fails closed: any failure ends the
process with ``EX_CONFIG``. What SGLang never loads at all cannot end anything; that is caught before the start
(``python -m llmfleet_plugin check``) and after it (each rank reports what is active, see ``_report.py``).

A feature is turned on by its environment variable and is a module with a ``FEATURE`` (see ``_feature.py``). Importing
this package imports neither SGLang nor torch.
"""

from __future__ import annotations

import logging
import os
import sys

EX_CONFIG = 78

logger = logging.getLogger("llmfleet")


def load() -> None:
    """Install the features that the environment asks for, or end the process."""
    try:
        from llmfleet_plugin._install import install_wanted

        install_wanted(os.environ)
    except BaseException as error:  # whatever it was, the stock engine must not run in our name
        logger.critical("llmfleet: the engine is not started: %s", error, exc_info=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # SGLang would catch SystemExit's cousins and carry on; only this cannot be caught.
        os._exit(EX_CONFIG)
