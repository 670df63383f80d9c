"""Archives of adapters: a tar.gz with the two files of a LoRA, and nothing else.

Reading checks the name, kind and size of each member, and writes only these two files.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO

from batchmill.errors import InvalidInput, TooLarge

ADAPTER_MEDIA = (
    "application/vnd.batchmill.adapter+gzip"  # a web page cannot send this type cross-origin without a preflight
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: 1024 * 1024, WEIGHTS: 8 * 1024**3}  # the files of an adapter -> bytes at most
PICKLES = ("adapter_model.bin", "adapter_model.pt")
BUNDLE_BYTES_MAX = sum(FILES.values()) + 64 * 1024 * 1024
HEADER_BYTES_MAX = 64 * 1024  # of the extended headers of one tar member
PIECE_BYTES = 1024 * 1024
SHOWN_CHARS = 80


def write(out: BinaryIO, folder: Path) -> None:
    """Write the archive of the adapter in a folder. Raises: InvalidInput, TooLarge."""
    check_names(str(folder), {path.name for path in folder.iterdir()} if folder.is_dir() else set())
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT, compresslevel=1) as archive:
        for name, bytes_max in FILES.items():
            path = folder / name
            try:
                with path.open("rb") as file:
                    info = tarfile.TarInfo(name)
                    info.mode, info.size = 0o644, os.fstat(file.fileno()).st_size
                    if info.size > bytes_max:
                        raise too_large(name)
                    archive.addfile(info, file)
            except OSError as error:
                raise InvalidInput(f"{path} cannot be read: {error.strerror}", code="unreadable_file") from None


def read(source: BinaryIO, folder: Path) -> None:
    """Unpack an archive into `folder`, which must be empty. Raises: InvalidInput (`invalid_bundle`), TooLarge."""
    try:
        with (
            gzip.GzipFile(fileobj=source, mode="rb") as unpacked,
            tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_PlainInfo) as archive,
        ):
            for member in archive:
                _unpack(archive, member, folder)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeError, RecursionError) as error:
        raise _invalid(f"it is not a tar.gz: {error}") from None
    for name in FILES:
        if not (folder / name).exists():
            raise _invalid(f"it has no {name}")


class _PlainInfo(tarfile.TarInfo):
    """A tar member with a limit on its extended headers, so that they cannot fill the memory."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if not (self.isreg() or self.isdir()) and self.size > HEADER_BYTES_MAX:
            raise _invalid(f"a header of {self.size:,} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name = member.name
    if name in PICKLES:
        raise refused_pickle(name)
    if name not in FILES or not member.isreg() or member.issparse():
        raise _invalid(f"{name[:SHOWN_CHARS]!r} is not one of {' and '.join(FILES)}")
    if member.size > FILES[name]:
        raise too_large(name)
    file = archive.extractfile(member)
    assert file is not None, "it is a file"
    try:
        with (folder / name).open("xb") as out:
            while piece := file.read(PIECE_BYTES):
                out.write(piece)
    except FileExistsError:
        raise _invalid(f"it has {name!r} twice") from None


def check_names(location: str, names: set[str]) -> None:
    """Raises: InvalidInput if a location with files of these names has no supported adapter."""
    missing = [name for name in FILES if name not in names]
    pickles = [name for name in PICKLES if name in names]
    if WEIGHTS in missing and pickles:
        raise refused_pickle(pickles[0])
    if missing:
        raise InvalidInput(f"there is no {missing[0]} at {location}", code="unknown_adapter")


def refused_pickle(name: str) -> InvalidInput:
    """The error for weights in a pickle."""
    return InvalidInput(
        f"the adapter has its weights in {name}, a pickle: loading it runs its author's code; save it as "
        f"{WEIGHTS} (PEFT's save_pretrained does)",
        code="invalid_adapter",
    )


def too_large(name: str) -> TooLarge:
    return TooLarge(f"{name} of an adapter is larger than the limit of {FILES[name]:,} bytes")


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(f"this is not an archive of an adapter: {message}", code="invalid_bundle")
