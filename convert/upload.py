"""Upload of what was converted to a new repo of the Hub.

What can be asked beforehand is: a token, its rights, the repo's name. Nothing is created before
there is something to upload.
"""

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelError, RequestError
from mlxserve.report import one_line, show
from mlxserve.sources.hub_errors import HubUnavailableError
from mlxserve.sources.hub_names import HubRef, parse
from mlxserve.types import OnProgress

logger = logging.getLogger(__name__)

PAUSES_S = (5, 30)  # before the second try and the third; the library itself repeats requests
TOKEN = "`hf auth login` or HF_TOKEN"


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that may begin. endpoint: the Hub's address."""

    repo: str
    private: bool
    endpoint: str

    def run(self, folder: Path, on_progress: OnProgress | None) -> str:
        """Create the repo and upload the directory as one commit; returns the repo's address.

        Files that arrived aren't sent again, and a failure that may pass is followed by another
        try. on_progress: told that it begins; huggingface_hub shows bars of its own where that is
        given and stderr is a terminal. Raises ModelError, which says how to go on: the directory
        stays as it is.
        """
        private = " --private" if self.private else ""
        again = f"{folder} is whole, and `hf upload {self.repo} {folder}{private}` uploads it"
        api = _api(self.endpoint)
        if on_progress is not None:
            on_progress("upload", 0, None)
        try:
            with _bars(shown=on_progress is not None and sys.stderr.isatty()):
                with _explained(self.repo, self.endpoint):
                    api.create_repo(self.repo, private=self.private, repo_type="model")
                self._upload(api, folder)
        except ModelError as e:
            raise ModelError(f"{e}; {again}") from e
        except (KeyboardInterrupt, SystemExit):
            logger.warning("the upload was interrupted; %s", again)
            raise
        return f"{self.endpoint}/{self.repo}"

    def _upload(self, api: Any, folder: Path) -> None:
        for pause in (*PAUSES_S, None):
            try:
                with _explained(self.repo, self.endpoint):
                    api.upload_folder(
                        repo_id=self.repo,
                        folder_path=folder,
                        commit_message="Upload what mlxserve converted",
                    )
                return
            except HubUnavailableError as e:
                if pause is None:
                    raise
                logger.warning("%s; trying again in %d s", e, pause)
                time.sleep(pause)


def check_upload(repo: str | None, *, private: bool, endpoint: str | None = None) -> Upload | None:
    """Ask the Hub whether this may be uploaded; None where nothing is to be.

    Raises RequestError for a name that can't be a repo's, for a missing token and for one that may
    not write there, and for a repo that exists; ModelError where the Hub can't be asked.
    """
    if repo is None:
        if private:
            raise RequestError(
                "private is set, and nothing is to be uploaded; name a repo", param="private"
            )
        return None
    if not _is_repo(repo):
        raise RequestError(f"upload_repo is {show(repo)}; write OWNER/NAME", param="upload_repo")
    api = _api(endpoint)
    with _explained(repo, api.endpoint):
        who = api.whoami()
        _check_rights(repo, who)
        if api.repo_exists(repo):
            raise RequestError(
                f"upload_repo is {repo}, which exists already at {api.endpoint}/{repo}; give "
                "another name, or delete that one",
                param="upload_repo",
            )
    return Upload(repo, private, api.endpoint)


def _is_repo(text: str) -> bool:
    try:
        return parse(text) == HubRef(text)
    except ModelError:
        return False


def _check_rights(repo: str, who: Any) -> None:
    """who: the Hub's answer about the token. What it leaves open, the upload will show."""
    owner = repo.partition("/")[0]
    organisations = [org["name"] for org in who.get("orgs", [])]
    if owner not in (who["name"], *organisations):
        raise RequestError(
            f"upload_repo is {repo}, and {who['name']}, whose token it is, is no member of "
            f"{owner}; give {' or '.join([who['name'], *organisations])} as owner, or another "
            f"token with {TOKEN}",
            param="upload_repo",
        )
    if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise RequestError(
            f"upload_repo is {repo}, and the token may only read; give one that may write with "
            f"{TOKEN}",
            param="upload_repo",
        )


def _api(endpoint: str | None) -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint, library_name="mlxserve")


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Whether huggingface_hub shows progress."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


@contextmanager
def _explained(repo: str, endpoint: str) -> Iterator[None]:
    """Raise RequestError or ModelError, in one line, for what the library raises."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (httpx's in 1.x, httpx2's in 2.x)
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except LocalTokenNotFoundError:
        raise RequestError(
            f"upload_repo is {repo}, and there is no token of the Hub here; give one that may "
            f"write with {TOKEN}",
            param="upload_repo",
        ) from None
    except OfflineModeIsEnabled:
        raise RequestError(
            f"upload_repo is {repo}, and HF_HUB_OFFLINE is set; unset it", param="upload_repo"
        ) from None
    except (HfHubHTTPError, HTTPError) as e:
        raise _failure(repo, endpoint, e) from e
    except (RuntimeError, ValueError, OSError) as e:  # of one of the files
        if isinstance(e, RequestError):
            raise
        cause = e.__cause__ if isinstance(e.__cause__, Exception) else e
        raise _failure(repo, endpoint, cause) from e


def _status(e: Exception) -> int | None:
    """The Hub's answer, None if there was none. Xet, which is no Python, tells it in words only."""
    response = getattr(e, "response", None)
    if response is not None:
        return response.status_code
    found = re.search(r"\((4\d\d) [A-Z]", str(e))
    return int(found[1]) if found else None


def _failure(repo: str, endpoint: str, e: Exception) -> ModelError:
    status = _status(e)
    match status:
        case 401:
            return ModelError(f"{repo}: the Hub refused the token (401); renew it with {TOKEN}")
        case 403:
            owner = repo.partition("/")[0]
            return ModelError(
                f"{repo}: the Hub forbids it to this token (403); give one that may write to "
                f"{owner} with {TOKEN}"
            )
        case 409:
            return ModelError(f"{repo} exists already at {endpoint}/{repo} (409)")
        case None:
            reason = show(one_line(e) or type(e).__name__, 160)
            return HubUnavailableError(
                f"{repo}: the connection to {endpoint} failed ({reason})", again=True
            )
        case 408 | 429 | 500 | 502 | 503 | 504:
            return HubUnavailableError(f"{repo}: the Hub can't take it now ({status})", again=True)
        case _:
            return ModelError(f"{repo}: the Hub answered {status}: {show(one_line(e), 160)}")
