"""What a Hub's failures mean for the person who asked: one line each, with the way out."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxserve.errors import ModelError
from mlxserve.report import show

KEPT = "what was downloaded is kept, and a pull goes on from there"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HubUnavailableError(ModelError):
    """The Hub can't be asked now: no network, offline mode, too many requests, its own failure.

    again: whether a new try in a moment makes sense.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


@contextmanager
def explained(repo: str, revision: str, endpoint: str, file: str | None = None) -> Iterator[None]:
    """Raise ModelError for what a request raises: HubUnavailableError where waiting may help.

    file: the one that is being downloaded, None while the list of files is asked for.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (httpx's in 1.x, httpx2's in 2.x)
        OfflineModeIsEnabled,
    )

    what = f"{repo}/{file}" if file else repo
    try:
        yield
    except OfflineModeIsEnabled:
        raise HubUnavailableError(
            f"{what} is not on this machine, and HF_HUB_OFFLINE is set; unset it to download"
        ) from None
    except HfHubHTTPError as e:
        raise _refused(repo, revision, what, endpoint, e) from e
    except HTTPError as e:
        kept = f"; {KEPT}" if file else ""
        reason = show(str(e) or type(e).__name__, 120)
        raise HubUnavailableError(
            f"{what}: the connection to {endpoint} failed ({reason}); check the network{kept}",
            again=True,
        ) from e


def _refused(repo: str, revision: str, what: str, endpoint: str, e: Any) -> ModelError:
    """The error for an answer that is no success."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status = e.response.status_code
    code = e.response.headers.get("X-Error-Code")
    token = "give a token with `hf auth login` or HF_TOKEN"
    if isinstance(e, GatedRepoError):
        if status == 401:
            return ModelError(
                f"{repo} is gated; accept its licence at {endpoint}/{repo}, then {token}"
            )
        return ModelError(
            f"{repo} is gated, and your account has no access yet; accept its licence at "
            f"{endpoint}/{repo} (with a new token: `hf auth login` or HF_TOKEN)"
        )
    if code == "RevisionNotFound":
        return ModelError(
            f"{repo} has no revision {show(revision)}; its branches and tags are listed at "
            f"{endpoint}/{repo}/tree/main"
        )
    if code == "EntryNotFound":
        return ModelError(f"{what} is gone from the Hub ({status}); pull again")
    if isinstance(e, RepositoryNotFoundError):
        return ModelError(
            f"{endpoint} has no public model {repo} ({status}); check the name, and for a private "
            f"one {token}"
        )
    match status:
        case 401:
            return ModelError(f"{what}: the Hub refused the token (401); renew it: {token}")
        case 403:
            return ModelError(
                f"{what}: the Hub forbids it to this token (403{_said(e)}); accept the licence at "
                f"{endpoint}/{repo} if there is one, or {token} that may read it"
            )
        case 404:
            return ModelError(
                f"{what}: not found (404); the repo or revision {show(revision)} doesn't exist, or "
                f"is private: {token}"
            )
        case 429:
            wait = _retry_after(e)
            return HubUnavailableError(
                f"{what}: the Hub's rate limit is reached (429); pull again "
                f"{f'in {wait} s' if wait else 'in a few minutes'}, a token (HF_TOKEN) raises it"
            )
        case _ if status >= 500:
            return HubUnavailableError(
                f"{what}: the Hub has a problem of its own ({status}), for a while at most; "
                f"try again later, {KEPT}",
                again=True,
            )
        case _:
            return ModelError(
                f"{what}: the Hub answered {status}{_said(e)}; check the name and HF_ENDPOINT"
            )


def _retry_after(e: Any) -> int | None:
    """Seconds to wait, from either header that tells."""
    headers = e.response.headers
    text = headers.get("Retry-After") or ""
    if not text:
        parts = [part.strip() for part in headers.get("RateLimit", "").split(";")]
        text = next((part[2:] for part in parts if part.startswith("t=")), "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else None


def _said(e: Any) -> str:
    text = e.response.headers.get("X-Error-Message")
    return f": {show(text, 160)}" if text else ""
