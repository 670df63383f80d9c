"""An adapter of a model hub, by its id. Needs huggingface_hub, whose environment counts: HF_ENDPOINT, HF_HUB_OFFLINE.

Offline its cache is all there is; otherwise the files are downloaded afresh, at the revision that is the newest now.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import disable_progress_bars

from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, Unavailable
from batchmill.models.adapters.fetching import check_size, copy_pieces, write_file
from batchmill.wire.adapter_bundles import FILES, check_names

LOOK_S = 60.0  # for what a repository holds


def download(source: str, place: Path, work: Path, token: str | None) -> None:
    """The files of the repository that `source` names (ORG/NAME, or ORG/NAME@REVISION) into `place`.

    Args: work: a folder for what is on its way.

    Raises: InvalidInput, AuthRefused for one that cannot be read with this token, TooLarge, Unavailable.
    """
    disable_progress_bars()
    repository, _, revision = source.partition("@")
    try:
        if constants.HF_HUB_OFFLINE:
            found = [hf_hub_download(repository, name, revision=revision or None) for name in FILES]
            folder = Path(found[0]).parent
        else:
            folder = _download(repository, revision or None, work / "download", token)
    except (hub_errors.HfHubHTTPError, hub_errors.EntryNotFoundError, hub_errors.HFValidationError, OSError) as error:
        raise _translated(source, error, token) from None
    check_names(source, {path.name for path in folder.iterdir()})
    for name in FILES:
        with (folder / name).open("rb") as file:  # of the cache they are links
            write_file(place, name, lambda _, write, file=file: copy_pieces(file, write))


def _download(repository: str, revision: str | None, work: Path, token: str | None) -> Path:
    """Sizes are known before a byte is fetched."""
    found = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=LOOK_S, token=token)
    siblings = {each.rfilename: each.size for each in found.siblings or ()}
    check_names(repository, set(siblings))
    for name in FILES:
        check_size(name, siblings[name] or 0)
        hf_hub_download(repository, name, revision=found.sha, local_dir=work, token=token)
    return work


def _translated(source: str, error: Exception, token: str | None) -> BatchmillError:
    """What the hub's library says, as ours. Its messages name no token."""
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, hub_errors.GatedRepoError):
        return AuthRefused(f"{source} is gated: ask for access to it, and give a token that has it", code="hub_refused")
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        way = "this token may not read it" if token else "it is private: give a token that may read it"
        return InvalidInput(f"the hub {constants.ENDPOINT} has no {source}, or {way}", code="unknown_adapter")
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return InvalidInput(f"{source.partition('@')[0]} has no such revision", code="unknown_adapter")
    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return InvalidInput(
            f"{source} is not in the cache of the hub, and HF_HUB_OFFLINE forbids to ask for it", code="unknown_adapter"
        )
    if isinstance(error, hub_errors.HFValidationError):
        return InvalidInput(f"{source} is no id of a model hub: {message}", code="invalid_source")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return AuthRefused(f"the hub refused {source} ({status}): give a token that may read it", code="hub_refused")
    return Unavailable(f"{source} could not be fetched from {constants.ENDPOINT}: {message}", code="hub_unavailable")
