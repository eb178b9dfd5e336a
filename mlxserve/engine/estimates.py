"""What a model's cache takes, how fast memory lets it run, and what that costs: arithmetic only.

Nothing is measured or allocated here. Speeds are bounds that a machine can't pass. Every function
raises RequestError for a value that is no number in its range, naming it.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from mlxserve.cache.spec import (
    PAGE_TOKENS,
    UNPACKED,
    KVBits,
    LayerSpec,
    PagedSpec,
    State,
    page_bytes,
    state_bytes,
    token_bytes,
    window_pages,
)
from mlxserve.errors import RequestError

# A sequence writes to one hot page, and to the next before a step has sealed the first.
HOT_PAGES = 2


def check_above_zero(name: str, value: float) -> None:
    """Raise RequestError unless `value` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise RequestError(f"{name} is {value:g}; it must be a finite number above 0")


def check_not_negative(name: str, value: float) -> None:
    """Raise RequestError unless `value` is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise RequestError(f"{name} is {value:g}; it must be a finite number of at least 0")


def check_share(name: str, value: float) -> None:
    """Raise RequestError unless `value` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise RequestError(f"{name} is {value:g}; it must be above 0 and at most 1")


def check_acceptance(name: str, value: float) -> None:
    """Raise RequestError unless `value` is at least 0 and at most 1."""
    if not 0 <= value <= 1:
        raise RequestError(f"{name} is {value:g}; it must be from 0 to 1")


def check_at_least_1(name: str, value: int) -> None:
    """Raise RequestError unless `value` is at least 1."""
    if value < 1:
        raise RequestError(f"{name} is {value}; it must be a whole number of at least 1")


def sealed_pages(spec: PagedSpec, tokens: int) -> int:
    """The most sealed pages that a sequence holds in one layer on its way to `tokens` tokens.

    complete = floor(tokens / 64)
    full:    complete
    window:  min(complete, ceil(keep / 64) + ceil((window - 1) / 64)), see `window_pages`
    """
    check_not_negative("tokens", tokens)
    complete, bound = tokens // PAGE_TOKENS, window_pages(spec)
    return complete if bound is None else min(complete, bound)


def sealed_bytes(
    specs: Sequence[LayerSpec], tokens: int, itemsize: int, bits: KVBits = UNPACKED
) -> int:
    """Bytes of a sequence's sealed pages over all layers: the sum of pages times page_bytes.

    itemsize: of a number that isn't packed.
    """
    return sum(
        sealed_pages(spec, tokens) * page_bytes(spec, itemsize, bits)
        for spec in specs
        if not isinstance(spec, State)
    )


def hot_bytes(specs: Sequence[LayerSpec], itemsize: int) -> int:
    """Bytes of a sequence's hot pages, which are never packed: 2 pages in every layer with any."""
    pages = (page_bytes(spec, itemsize) for spec in specs if not isinstance(spec, State))
    return HOT_PAGES * sum(pages)


def states_bytes(specs: Sequence[LayerSpec]) -> int:
    """Bytes of a sequence's recurrent states, without snapshots of them."""
    return sum(state_bytes(spec) for spec in specs if isinstance(spec, State))


def sequence_bytes(
    specs: Sequence[LayerSpec], tokens: int, itemsize: int, bits: KVBits = UNPACKED
) -> int:
    """Bytes of cache that a sequence of `tokens` tokens needs: sealed + hot + states."""
    sealed = sealed_bytes(specs, tokens, itemsize, bits)
    return sealed + hot_bytes(specs, itemsize) + states_bytes(specs)


def read_bytes(
    specs: Sequence[LayerSpec], tokens: int, itemsize: int, bits: KVBits = UNPACKED
) -> int:
    """Bytes of cache that a decode step reads for one sequence of `tokens` tokens.

    Sealed pages, states, and the newest `tokens % 64` tokens, which aren't packed.
    """
    newest = tokens % PAGE_TOKENS * token_bytes(specs, itemsize)
    sealed = sealed_bytes(specs, tokens, itemsize, bits)
    return sealed + states_bytes(specs) + int(newest)


def tokens_in_pool(pool_bytes: int, bytes_per_token: float) -> int:
    """Tokens that a pool of so many bytes holds: floor(pool_bytes / bytes_per_token)."""
    check_not_negative("pool_bytes", pool_bytes)
    check_above_zero("bytes_per_token", bytes_per_token)
    return int(pool_bytes / bytes_per_token)


def most_users(room_bytes: int, bytes_per_sequence: int) -> int:
    """Sequences that fit at once: floor(room / sequence), 0 where there is no room."""
    check_above_zero("bytes_per_sequence", bytes_per_sequence)
    check_not_negative("room_bytes", room_bytes)
    return room_bytes // bytes_per_sequence


def longest_context(
    specs: Sequence[LayerSpec],
    users: int,
    room_bytes: int,
    itemsize: int,
    bits: KVBits = UNPACKED,
    *,
    limit_tokens: int,
) -> int:
    """The most tokens, up to `limit_tokens`, that so many sequences may each have in the room.

    The largest t with `users * sequence_bytes(t) <= room_bytes`; 0 where there is none.
    """
    check_at_least_1("users", users)
    check_not_negative("room_bytes", room_bytes)
    check_at_least_1("limit_tokens", limit_tokens)
    complete = bisect_right(
        range(limit_tokens // PAGE_TOKENS + 1),
        room_bytes // users,
        key=lambda pages: sequence_bytes(specs, pages * PAGE_TOKENS, itemsize, bits),
    )
    return min(complete * PAGE_TOKENS - 1, limit_tokens) if complete else 0


def decode_tokens_per_s(
    weight_bytes: int, bandwidth: float, cache_bytes: int = 0, users: int = 1
) -> float:
    """Tokens per second, over all users, that reading from memory allows: an upper bound.

        users * bandwidth / (weight_bytes + users * cache_bytes)

    A step reads every weight once for the whole batch, and each sequence's cache once; computing is
    taken to hide behind that (the roofline of Williams et al. 2009, doi:10.1145/1498765.1498785).
    bandwidth: bytes per second. cache_bytes: read for one sequence, see `read_bytes`. An embedding
    table counts as read in full, which it is only where it is the output head too.
    """
    check_above_zero("weight_bytes", weight_bytes)
    check_above_zero("bandwidth", bandwidth)
    check_not_negative("cache_bytes", cache_bytes)
    check_at_least_1("users", users)
    return users * bandwidth / (weight_bytes + users * cache_bytes)


def prefill_s(
    parameters: int, prompt_tokens: int, flops_per_s: float, utilisation: float = 0.5
) -> float:
    """Seconds to compute a prompt where arithmetic is the limit.

        2 * parameters * prompt_tokens / (flops_per_s * utilisation)

    A multiplication and an addition for each weight and token (Kaplan et al. 2020,
    arXiv:2001.08361); attention's own are left out. utilisation: the share of the machine's peak
    that is reached (MFU in Chowdhery et al. 2022, arXiv:2204.02311).
    """
    check_at_least_1("parameters", parameters)
    check_at_least_1("prompt_tokens", prompt_tokens)
    check_above_zero("flops_per_s", flops_per_s)
    check_share("utilisation", utilisation)
    return 2 * parameters * prompt_tokens / (flops_per_s * utilisation)


def requests_in_flight(requests_per_s: float, latency_s: float) -> float:
    """Requests under way at a time, on average: requests_per_s * latency_s.

    Little's law (1961, doi:10.1287/opre.9.3.383). latency_s: from arrival to the last token.
    """
    check_above_zero("requests_per_s", requests_per_s)
    check_above_zero("latency_s", latency_s)
    return requests_per_s * latency_s


def tokens_per_pass(acceptance: float, draft_tokens: int) -> float:
    """Tokens that a pass of the model yields on average, with drafts of `draft_tokens` tokens.

        (1 - acceptance^(draft_tokens + 1)) / (1 - acceptance)

    acceptance: the probability that a drafted token is taken, each independently of the others
    (Leviathan et al. 2023, arXiv:2211.17192, equation 1). At 1 it is draft_tokens + 1.
    """
    check_acceptance("acceptance", acceptance)
    check_at_least_1("draft_tokens", draft_tokens)
    # The sum of the geometric series, which has no 0 / 0 at 1.
    return math.fsum(acceptance**n for n in range(draft_tokens + 1))


def unit_cost(
    hourly: float, per_s: float, units: int, utilisation: float = 1.0, overhead: float = 0.0
) -> float:
    """What `units` tokens or requests cost on a machine that is paid by the hour.

        hourly / (3600 * per_s * utilisation) * units * (1 + overhead)

    hourly: in any currency. per_s: of the same units, while busy. utilisation: the share of paid
    time in which it is busy. overhead: 0.3 adds 30%, for whatever the hourly price leaves out.
    """
    check_above_zero("hourly", hourly)
    check_above_zero("per_s", per_s)
    check_at_least_1("units", units)
    check_share("utilisation", utilisation)
    check_not_negative("overhead", overhead)
    return hourly / (3600 * per_s * utilisation) * units * (1 + overhead)


def break_even_tokens(fixed: float, bought: float, own: float) -> float:
    """Tokens for which running a model costs as much as buying them, in the time `fixed` is for.

        fixed / (bought - own) * 1e6

    fixed: what is paid however many tokens there are. bought, own: prices of a million tokens,
    bought elsewhere and made here, beyond `fixed`.
    """
    check_above_zero("fixed", fixed)
    check_not_negative("own", own)
    check_above_zero("bought", bought)
    if bought <= own:
        raise RequestError(f"own is {own:g}; it must be below the price of bought ones, {bought:g}")
    return fixed / (bought - own) * 1e6


def place_layers(
    needs: Sequence[int],
    capacities: Sequence[float],
    first: int = 0,
    limits: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """How many consecutive layers each host takes, at least one, for the best balance: the largest
    share of a host's capacity that is taken is as small as can be.

    needs: bytes of each layer. capacities: of each host, its memory, or the bytes that it reads in
    a second. first: bytes beside the layers on the first host. limits: bytes that each may have at
    most. Raises RequestError where these don't hold all layers.
    """
    for capacity in capacities:
        check_above_zero("capacities", capacity)
    if not 0 < len(capacities) <= len(needs):
        raise RequestError(
            f"capacities are {len(capacities)} for {len(needs)} layers; give each one"
        )
    sums = [0, *accumulate(needs)]
    hosts = len(capacities)

    def share_of(host: int, begin: int, end: int) -> float:
        taken = sums[end] - sums[begin] + first * (host == 0)
        if limits is not None and taken > limits[host]:
            return math.inf
        return taken / capacities[host]

    @cache
    def best(host: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """Of the hosts from `host` on: the smallest largest share, and their counts."""
        if host == hosts - 1:
            return share_of(host, begin, len(needs)), (len(needs) - begin,)
        choices = []
        for end in range(begin + 1, len(needs) - (hosts - 1 - host) + 1):
            share, counts = best(host + 1, end)
            choices.append((max(share, share_of(host, begin, end)), (end - begin, *counts)))
        return min(choices)

    share, counts = best(0, 0)
    if share == math.inf:
        allowed = ", ".join(f"{limit / 2**30:.1f}" for limit in limits or ())
        raise RequestError(
            f"the layers take {(sums[-1] + first) / 2**30:.1f} GiB, and no division of them "
            f"fits into {allowed} GiB; use more machines, or fewer bits"
        )
    return counts
