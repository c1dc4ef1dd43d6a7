# SPDX-License-Identifier: Apache-2.0
"""Index queries of DeepSeek V4 as bf16 (``LLMFLEET_INDEX_QUERIES=bf16``), for index keys that are bf16.

With the engine's fp8 queries bf16 keys bring back a third of what fp8 loses, with bf16 queries nine tenths
(``docs/benchmarks/recall_h200.json``). The engine's function that rotates and quantises a query is replaced by the
kernel in ``llmfleet_kernels.index_query``; the projection before it and the readers after it stay. A bf16 query has no
scale, so the weights are those of the model, scaled as the engine does. Nothing of it is kept or sent: pool, budget,
handshake and HiCache do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmfleet_plugin._feature import VERSIONS, Context, Feature
from llmfleet_plugin._hooks import Hooks

if TYPE_CHECKING:
    import torch

#: What the indexer calls for its query, by its name in the module that calls it: nothing else does.
_QUERY = "sglang.srt.layers.attention.dsv4.indexer.fused_q_indexer_rope_hadamard_quant"
HOOKS = {version: {_QUERY: "(q_input, weight, weight_scale, freqs_cis, positions)"} for version in VERSIONS}


def install(_context: Context, hooks: Hooks) -> dict[str, Any]:
    from llmfleet_kernels.index_query import index_query

    def query(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What the indexer takes: the query [rows, heads, 128], and its weights as [rows, heads, 1]."""
        found, weights = index_query(*arguments)
        return found, weights.unsqueeze(-1)

    hooks.replace(_QUERY, query)
    return {}


FEATURE = Feature(
    name="index_queries",
    variable="LLMFLEET_INDEX_QUERIES",
    values=("bf16",),
    hooks=HOOKS,
    install=install,
    needs={"index_keys": "bf16"},
)
