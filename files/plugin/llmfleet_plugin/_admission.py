# SPDX-License-Identifier: Apache-2.0
"""Who may join a bounded queue. Pure: the rule of ``queue_bound`` as numbers, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

#: What the engine itself tells a request that it rejects, and one that it evicts.
QUEUE_FULL = "The request queue is full."
OUTRANKED = "The request is aborted by a higher priority request."


@dataclass(frozen=True)
class Load:
    """Requests of one scheduler: ``queued`` in the bounded queues, ``coming`` that will still pass through one of
    them, ``free`` running slots that would take a queued request at once."""

    queued: int
    coming: int = 0
    free: int = 0

    def admits(self, bound: int) -> bool:
        """Whether one more request keeps the bounded queues within ``bound``, now and once all that comes has come."""
        return self.queued + 1 <= bound and self.queued + self.coming + 1 <= bound + self.free


@dataclass(frozen=True)
class Verdict:
    """``evicted`` is the index of the candidate that makes room for the accepted request."""

    accepted: bool
    evicted: int | None = None


def decide(load: Load, bound: int, rank: int = 0, candidates: Sequence[tuple[int, int]] = ()) -> Verdict:
    """Whether a request of ``rank`` (smaller is better) may join.

    ``candidates`` are the queued requests that may be evicted, as ``(rank, order of admission)``; none of them unless
    requests have priorities. The worst of them, the newest where several are worst, makes room for a strictly better
    request, as in the engine's own rule.
    """
    if load.admits(bound):
        return Verdict(accepted=True)
    if candidates and replace(load, queued=load.queued - 1).admits(bound):
        worst = max(range(len(candidates)), key=candidates.__getitem__)
        if rank < candidates[worst][0]:
            return Verdict(accepted=True, evicted=worst)
    return Verdict(accepted=False)
