# SPDX-License-Identifier: Apache-2.0
"""Every feature there is, in the order in which they are installed."""

from __future__ import annotations

from llmfleet_plugin import api_keys, index_keys, index_queries, indexer_logits, queue_bound, sparse_mla
from llmfleet_plugin._feature import Feature

FEATURES: tuple[Feature, ...] = (
    api_keys.FEATURE,
    indexer_logits.FEATURE,
    index_keys.FEATURE,
    index_queries.FEATURE,
    sparse_mla.FEATURE,
    queue_bound.FEATURE,
)
