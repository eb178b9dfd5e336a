"""Who may ask, and how much: API keys, and what each may have in a minute."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from mlxserve.server.problems import Problem


@dataclass(slots=True)
class Allowance:
    """So much a minute, refilled all the time. May be overdrawn by what is known only later."""

    per_minute: int
    left: float = field(init=False)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = float(self.per_minute)

    def wait_s(self, now_s: float) -> float:
        """Seconds until something is left; 0: now."""
        refilled = self.left + (now_s - self.at_s) * self.per_minute / 60
        self.left, self.at_s = min(refilled, float(self.per_minute)), now_s
        return max(0.0, (1 - self.left) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self.left -= amount


@dataclass(slots=True)
class Tenant:
    """name: what logs and the cache know it by; nothing of its key can be told from it."""

    name: str
    requests: Allowance | None
    tokens: Allowance | None


def tenant_names(keys: tuple[str, ...]) -> list[str]:
    """Of the tenants that these keys make; without keys there is one, of no name."""
    return [f"key{i}" for i in range(1, len(keys) + 1)] or [""]


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
        now_s = self._clock()
        for what, allowance in (("requests", tenant.requests), ("tokens", tenant.tokens)):
            if allowance is not None and (wait_s := allowance.wait_s(now_s)) > 0:
                raise Problem(
                    429,
                    f"over {allowance.per_minute} {what} per minute; wait {ceil(wait_s)} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        if tenant.requests is not None:
            tenant.requests.take(1)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
