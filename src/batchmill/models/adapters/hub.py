"""Downloads an adapter from a model hub. Needs huggingface_hub, with its variables HF_ENDPOINT and HF_HUB_OFFLINE.

Offline, only the hub's local cache is used. Otherwise the files of the newest revision are downloaded again.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import disable_progress_bars

from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, Unavailable
from batchmill.models.adapters.fetching import check_size, copy_chunks, write_file
from batchmill.wire.adapter_bundles import FILES, check_names

INFO_S = 60.0  # timeout for the list of a repository's files


def download(source: str, target: Path, work: Path, token: str | None) -> None:
    """Download the files of the repository `source` (ORG/NAME, or ORG/NAME@REVISION) into `target`.

    Args:
        work: a folder for temporary files.

    Raises: InvalidInput; AuthRefused if the token may not read it; TooLarge; Unavailable.
    """
    disable_progress_bars()
    repository, _, revision = source.partition("@")
    try:
        if constants.HF_HUB_OFFLINE:
            paths = [hf_hub_download(repository, name, revision=revision or None) for name in FILES]
            folder = Path(paths[0]).parent
        else:
            folder = _download(repository, revision or None, work / "download", token)
    except (hub_errors.HfHubHTTPError, hub_errors.EntryNotFoundError, hub_errors.HFValidationError, OSError) as error:
        raise _translate(source, error, token) from None
    check_names(source, {path.name for path in folder.iterdir()})
    for name in FILES:
        with (folder / name).open("rb") as file:  # files of the cache are links
            write_file(target, name, lambda _, write, file=file: copy_chunks(file, write))


def _download(repository: str, revision: str | None, work: Path, token: str | None) -> Path:
    """Download into `work`, after a check of all sizes."""
    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=INFO_S, token=token)
    siblings = {each.rfilename: each.size for each in info.siblings or ()}
    check_names(repository, set(siblings))
    for name in FILES:
        check_size(name, siblings[name] or 0)
        hf_hub_download(repository, name, revision=info.sha, local_dir=work, token=token)
    return work


def _translate(source: str, error: Exception, token: str | None) -> BatchmillError:
    """Convert an error of the hub's library. Its messages contain no token."""
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, hub_errors.GatedRepoError):
        return AuthRefused(
            f"{source} is gated: request access to it, and give a token that has access", code="hub_refused"
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        reason = "this token may not read it" if token else "it is private: give a token that may read it"
        return InvalidInput(f"the hub {constants.ENDPOINT} has no {source}, or {reason}", code="unknown_adapter")
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return InvalidInput(f"{source.partition('@')[0]} has no such revision", code="unknown_adapter")
    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return InvalidInput(
            f"{source} is not in the hub's cache, and HF_HUB_OFFLINE forbids a download", code="unknown_adapter"
        )
    if isinstance(error, hub_errors.HFValidationError):
        return InvalidInput(f"{source} is not an id of a model hub: {message}", code="invalid_source")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return AuthRefused(f"the hub refused {source} ({status}): give a token that may read it", code="hub_refused")
    return Unavailable(f"{source} could not be fetched from {constants.ENDPOINT}: {message}", code="hub_unavailable")
