# SPDX-License-Identifier: Apache-2.0
"""What SGLang's HiCache does in each pinned release, and how much of it a given memory buys. PRIVATE to the collection.

A rule names the releases that it was seen in and the reason; a release without rules is refused, unless the operator
names one whose rules are to be taken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ansible_collections.llmfleet.sglang.plugins.module_utils import _size
from ansible_collections.llmfleet.sglang.plugins.module_utils._geometry import Geometry, HostPool, Server, Traits
from ansible_collections.llmfleet.sglang.plugins.module_utils._refusal import RefusalError

# The engine refuses a pool unless this much of the machine stays available (pool_host/base.py).
ENGINE_CHECK = 10 * _size.GIB
HUGEPAGES = {"2MB": 2 * _size.MIB, "1GB": _size.GIB}
PLAIN_PAGE = 4 * _size.KIB
# A ratio is written with three decimals: a person can compare it, and what the cut loses is under a thousandth.
RATIO_STEPS = 1000
LARGEST_RATIO = 1_000_000
LARGEST_SIZE_GB = 1_000_000


@dataclass(frozen=True)
class Release:
    """What one release does. ``check_by_rank``: whether the engine's own check of free memory, made before each pool,
    divides what is free by the number of ranks and heeds the cgroup's limit (host_memory.py); 0.5.16 does neither."""

    traits: Traits
    check_by_rank: bool


RELEASES: Mapping[str, Release] = {
    "0.5.16": Release(Traits(counts_padding=False, packs_draft=False), check_by_rank=False),
    "0.5.23": Release(Traits(counts_padding=True, packs_draft=True), check_by_rank=True),
}
ALL = tuple(RELEASES)


@dataclass(frozen=True)
class Request:
    """What a rule looks at: one server that is to have HiCache."""

    role: str
    device: str
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    kind: str = ""


@dataclass(frozen=True)
class Rule:
    """``breaks(request)`` where the releases of ``releases`` refuse or miscount; ``reason`` in the reader's words."""

    code: str
    releases: Sequence[str]
    breaks: Callable[[Request], bool]
    reason: str
    cure: str


# Why a server has no HiCache although its host gives memory: not an error, unless it was asked for by name.
NONE_RULES = (
    Rule(
        "hicache_decode",
        ALL,
        lambda request: (
            request.role == "decode"
            and (request.kind == "dsv4" or not request.flags.get("disaggregation-decode-enable-radix-cache"))
        ),
        "a decode server keeps no prefix cache (disable-radix-cache), and HiCache without one is a start-up error",
        "remove hicache from the decode server; prefill is where prefixes are reused",
    ),
    Rule(
        "hicache_device",
        ALL,
        lambda request: request.device != "cuda",
        "HiCache copies through pinned CUDA host memory, which plan_device cpu has not",
        "remove hicache, or set plan_device: cuda",
    ),
)
# What cannot start, or would be counted wrongly.
REFUSE_RULES = (
    Rule(
        "hicache_layout",
        ALL,
        lambda request: (
            request.kind == "dsv4"
            and request.flags.get("hicache-mem-layout", "page_first")
            not in ("layer_first", "page_first", "page_first_direct")
        ),
        "DeepSeek V4's host pools know the layouts layer_first, page_first and page_first_direct",
        "set hicache-mem-layout to one of them, or leave it out",
    ),
    Rule(
        "hicache_direct_swa",
        ("0.5.23",),
        lambda request: request.environment.get("SGLANG_OPT_SM120_DIRECT_SWA_KV", "0").lower() in ("1", "true"),
        "SGLANG_OPT_SM120_DIRECT_SWA_KV stores several rows for a page, which the host pools cannot map",
        "remove it from the environment, or disable hicache",
    ),
    Rule(
        "hicache_pipeline",
        ALL,
        lambda request: str(request.flags.get("pp-size", 1)) != "1",
        "pipeline stages own different layers, and their pools are not counted here",
        "set pp-size to 1, or disable hicache",
    ),
    Rule(
        "hicache_hugepages",
        ALL,
        lambda request: request.environment.get("SGLANG_HUGEPAGE_SIZE", "").strip().upper() not in ("", *HUGEPAGES),
        "SGLANG_HUGEPAGE_SIZE is neither 2MB nor 1GB, so the engine would fall back to plain pages with a warning",
        "set it to 2MB or 1GB, or remove it",
    ),
)


def release_of(version: str, like: str = "") -> tuple[str, Release]:
    """The release whose rules hold for ``version``: its own, or the operator's ``like``. Raises RefusalError."""
    name = version if version in RELEASES else like
    if name not in RELEASES:
        raise RefusalError(
            "hicache_version",
            f"SGLang {version}: how it sizes HiCache is not known",
            f"one of {', '.join(RELEASES)}",
            "use one of these, or set plan_hicache_like to the one whose rules hold for it, after a measured start",
        )
    return name, RELEASES[name]


def broken(rules: Sequence[Rule], version: str, request: Request) -> Rule | None:
    """The first rule that a request breaks in a release."""
    return next((rule for rule in rules if version in rule.releases and rule.breaks(request)), None)


def server_of(
    release: Release, flags: Mapping[str, Any], environment: Mapping[str, str], ranks: int, index_keys: str
) -> Server:
    """What a server's flags and environment say about its KV cache. Raises RefusalError for a malformed value."""

    def number(name: str) -> int | None:
        value = flags.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
            raise RefusalError(
                "flag_value",
                f"{name} is {value!r}",
                "a whole number, 1 or more",
                f"correct {name} in the server's args",
            )
        return int(value)

    ratio = flags.get("swa-full-tokens-ratio")
    data_parallel = number("attn-dp-size") or number("dp-size") or 1
    return Server(
        traits=release.traits,
        ranks=ranks,
        attention_ranks=max(1, ranks // data_parallel),
        page=number("page-size"),
        kv_dtype=str(flags.get("kv-cache-dtype", "auto")),
        dtype=str(flags.get("dtype", "auto")),
        index_keys=index_keys,
        fp4_indexer=bool(flags.get("enable-deepseek-v4-fp4-indexer")),
        speculative=flags.get("speculative-algorithm") is not None,
        swa_ratio=None if ratio is None else Fraction(str(_size.parse_number(ratio, "swa-full-tokens-ratio"))),
        state_slots=number("max-mamba-cache-size"),
        bf16_state=environment.get("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "").lower() in ("bf16", "bfloat16"),
        bf16_ssm=environment.get("SGLANG_MAMBA_SSM_DTYPE", "").lower() in ("bf16", "bfloat16"),
    )


# ----------------------------------------------------------------------------------------------------------- the solver


@dataclass(frozen=True)
class Sizing:
    """What one rank takes: the flag that asks for it and the pools that follow. ``backed`` counts whole hugepages."""

    mode: str  # ratio, size
    value: float | int
    pools: Sequence[HostPool]
    backed: int

    @property
    def flags(self) -> dict[str, Any]:
        return {"hicache-ratio" if self.mode == "ratio" else "hicache-size": self.value}


def backed(pools: Sequence[HostPool], hugepage: int | None) -> int:
    """Bytes that pools take from the machine: each is a mapping of its own, in whole pages of what backs it."""
    page = hugepage or PLAIN_PAGE
    return sum(-(-pool.bytes // page) * page for pool in pools)


def sizing(
    geometry: Geometry, tokens: int | None, hugepage: int | None, ratio: float | None = None, size_gb: int | None = None
) -> Sizing:
    """The pools that a ratio (of ``tokens`` device tokens) or a size in GB brings."""
    pools = geometry.host_pools(tokens or 0, ratio, size_gb)
    if size_gb is not None:
        return Sizing("size", size_gb, pools, backed(pools, hugepage))
    return Sizing("ratio", ratio or 0.0, pools, backed(pools, hugepage))


def largest(
    geometry: Geometry, tokens: int | None, hugepage: int | None, fits: Callable[[Sizing], bool]
) -> Sizing | None:
    """The largest sizing of one rank that ``fits``; None where not even the smallest does.

    A ratio in thousandths where the device's pool is pinned, since it is finer; a size in whole GB where it is not and
    the model takes one. All pools grow with either number, so more room never gives less.
    """
    if tokens is not None:
        limit = LARGEST_RATIO * RATIO_STEPS

        def sized(count: int) -> Sizing:
            return sizing(geometry, tokens, hugepage, ratio=count / RATIO_STEPS)
    elif geometry.takes_size:
        limit = LARGEST_SIZE_GB

        def sized(count: int) -> Sizing:
            return sizing(geometry, None, hugepage, size_gb=count)
    else:
        return None
    count = _last_that_fits(limit, lambda count: fits(sized(count)))
    found = sized(count) if count else None
    return found if found and all(pool.pages for pool in found.pools) else None


def _last_that_fits(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest count from 0 to ``limit`` that fits, by halving: fitting counts come before those that do not."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def engine_need(release: Release, pools: Sequence[HostPool], ranks: int, hugepage: int | None) -> int:
    """Plain memory that a starting server has to find, beyond what it keeps free, for the engine itself not to refuse.

    Before each pool a rank checks that the pool fits into what is available, less 10 GiB. 0.5.23 divides that by the
    ranks, and by then the siblings may have theirs: R pool_k <= A - sum(R pools before k) - (R - 1) pool_k - 10 GiB.
    Solved for A - 10 GiB, the largest over k. 0.5.16 does not divide. Pools in hugepages take nothing from plain
    memory, and are compared with it all the same.
    """
    by_rank = ranks if release.check_by_rank else 1
    if hugepage is not None:
        return max((by_rank * pool.bytes for pool in pools), default=0)
    need, before = 0, 0
    for pool in pools:
        before += ranks * pool.bytes
        need = max(need, before + (by_rank - 1) * pool.bytes)
    return need
