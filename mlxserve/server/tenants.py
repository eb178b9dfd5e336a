"""Who may ask, and how much: API keys, and what each may have in a minute."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from mlxserve.server.problems import Problem

MAX_WAIT_S = 60.0
"""To tell a client that waits for answers under way: they may well take less than they may."""


@dataclass(slots=True)
class Allowance:
    """So much a minute, refilled all the time. left: without what is reserved; may be negative."""

    per_minute: int
    left: float = field(init=False)
    reserved: int = 0
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = float(self.per_minute)

    def refill(self, now_s: float) -> None:
        """Up to a minute's worth."""
        refilled = self.left + (now_s - self.at_s) * self.per_minute / 60
        self.left, self.at_s = min(refilled, float(self.per_minute)), now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is left; 0: it is."""
        return max(0.0, (amount - self.left) * 60 / self.per_minute)


@dataclass(slots=True)
class Tenant:
    """name: what logs and the cache know it by; nothing of its key can be told from it."""

    name: str
    requests: Allowance | None
    tokens: Allowance | None


def tenant_names(keys: tuple[str, ...]) -> list[str]:
    """Of the tenants that these keys make; without keys there is one, of no name.

    A key's name depends on nothing else: the first eight digits of its SHA-256.
    """
    return [f"key-{_digest(key).hex()[:8]}" for key in keys] or [""]


class Tenants:
    """All that may ask. Without keys there is one, with the name "".

    clock: seconds, monotonic.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock

        def tenant(name: str) -> Tenant:
            requests = requests_per_minute and Allowance(requests_per_minute)
            tokens = tokens_per_minute and Allowance(tokens_per_minute)
            return Tenant(name, requests or None, tokens or None)

        named = zip(keys, tenant_names(keys), strict=False)
        self._by_digest = {_digest(key): tenant(name) for key, name in named}
        self._anyone = None if keys else tenant("")

    def of(self, authorization: str | None, api_key: str | None) -> Tenant:
        """Whose request it is, by its headers. Raises Problem 401.

        Takes as long for a wrong key as for a right one, whatever they have in common.
        """
        if self._anyone is not None:
            return self._anyone
        scheme, _, token = (authorization or "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else api_key
        if not key:
            raise Problem(401, "no API key; send it as Authorization: Bearer KEY")
        given, found = _digest(key), None
        for digest, tenant in self._by_digest.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise Problem(401, "this API key isn't known here", code="invalid_api_key")
        return found

    def admit(self, tenant: Tenant) -> None:
        """Count a request. Raises Problem 429 if this minute's are used up."""
        if (requests := tenant.requests) is None:
            return
        requests.refill(self._clock())
        if (wait_s := requests.wait_s(1)) > 0:
            raise _over(f"over {requests.per_minute} requests per minute", wait_s)
        requests.left -= 1

    def reserve(self, tenant: Tenant, most: int) -> int:
        """Set aside the tokens that a request may take at most. Returns how many, for `settle`.

        Raises Problem 429 if they aren't left. A request beside which none of its tenant's runs
        needs one token only, and what it takes beyond what is left, the next ones wait for: else
        none could run that may take more than a minute's, and most say nothing of their length.
        """
        if (tokens := tenant.tokens) is None:
            return 0
        tokens.refill(self._clock())
        needed = most if tokens.reserved else 1
        if (wait_s := tokens.wait_s(needed)) > 0:
            wait_s = min(wait_s, MAX_WAIT_S) if tokens.reserved else wait_s
            raise _over(
                f"over {tokens.per_minute} tokens per minute: {max(0, int(tokens.left))} are left, "
                f"and this request may take {most}",
                wait_s,
            )
        tokens.reserved += most
        tokens.left -= most
        return most

    def settle(self, tenant: Tenant | None, reserved: int, used: int) -> None:
        """Give back what a request that is over has left of its reservation."""
        if tenant is not None and tenant.tokens is not None and reserved:
            tenant.tokens.reserved -= reserved
            tenant.tokens.left += reserved - used


def _over(what: str, wait_s: float) -> Problem:
    return Problem(
        429, f"{what}; wait {ceil(wait_s)} s", code="rate_limit_exceeded", retry_after_s=wait_s
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
