"""From what a user calls a model to where it lies: a catalog name, a path, or a name of the Hub."""

import logging
from dataclasses import replace
from pathlib import Path

from mlxserve.errors import ModelError
from mlxserve.sources import hub
from mlxserve.sources.catalog import CATALOG, Catalog
from mlxserve.sources.hub_cache import COMMIT, RepoCache, cache_root
from mlxserve.sources.hub_fetch import fetch
from mlxserve.sources.hub_names import HubModel, HubRef, parse
from mlxserve.sources.pull import installed, pull, unknown
from mlxserve.types import OnProgress

logger = logging.getLogger(__name__)


def resolve(
    name_or_path: str | Path,
    on_progress: OnProgress | None = None,
    *,
    catalog: Catalog = CATALOG,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> Path:
    """The file or directory of a model; what is not here yet is downloaded.

    A catalog name wins over a path, and a path that exists over a name of the Hub; `./name` is
    always a path. endpoint, cache: the Hub and its cache directory, for huggingface_hub's own.
    Raises ModelError for what is none of these, and for a download that fails.
    """
    if isinstance(name_or_path, str) and name_or_path in catalog:
        return pull(name_or_path, on_progress, catalog=catalog)
    if (path := local_path(name_or_path)) is not None:
        return path
    ref = parse(name_or_path) if isinstance(name_or_path, str) else None
    if ref is None:
        raise unknown(str(name_or_path), catalog)
    found = locate(ref, endpoint=endpoint, cache=cache)
    return found[0] if found[1] is None else fetch(found[1], on_progress)


def find(
    name_or_path: str, *, catalog: Catalog = CATALOG, cache: Path | None = None
) -> Path | None:
    """Where a model lies, if all of it is here: nobody is asked for it. Raises ModelError."""
    if name_or_path in catalog:
        return next((m.path for m in installed(catalog=catalog) if m.name == name_or_path), None)
    if (path := local_path(name_or_path)) is not None:
        return path
    ref = parse(name_or_path)
    return None if ref is None else hub.find(ref, cache=cache)


def hub_ref(name_or_path: str, *, catalog: Catalog = CATALOG) -> HubRef | None:
    """The Hub model that `resolve` would take this for, or None. Raises ModelError."""
    if name_or_path in catalog or local_path(name_or_path) is not None:
        return None
    return parse(name_or_path)


def local_path(name_or_path: str | Path) -> Path | None:
    """The path, if there is something at it."""
    try:
        path = Path(name_or_path).expanduser()
        if name_or_path != "" and path.exists():
            return path
    except (OSError, RuntimeError, ValueError):
        pass  # too long for a path, `~` of nobody, a NUL: not a path
    return None


def locate(
    ref: HubRef, *, endpoint: str | None = None, cache: Path | None = None
) -> tuple[Path, None] | tuple[Path | None, HubModel]:
    """Where a Hub model lies, perhaps in an older version, and what to fetch to have the newest.

    The first is None where it is not here. The second is None where nothing has to be fetched: the
    model is here, and the Hub has nothing newer, or can't be asked (which is logged), or needn't be
    (a commit, or offline mode). Raises ModelError.
    """
    from huggingface_hub import constants

    here = hub.find(ref, cache=cache)
    if here is not None and (COMMIT.fullmatch(ref.revision) or constants.HF_HUB_OFFLINE):
        return here, None
    if here is None:
        return None, hub.look_up(ref, endpoint=endpoint, cache=cache)
    if here.is_file():  # the repo may have more files, but this one is meant
        repo = RepoCache(cache or cache_root(), ref.repo)
        snapshot = repo.snapshot(repo.commit(ref.revision) or "")
        ref = replace(ref, file=here.relative_to(snapshot).as_posix(), quant=None)
    try:
        model = hub.look_up(ref, endpoint=endpoint, cache=cache, timeout_s=hub.QUICK_S)
    except ModelError as e:
        logger.warning("using the copy of %s that is here: %s", ref, e)
        return here, None
    if model.path == here and not model.missing():
        return here, None
    return here, model
