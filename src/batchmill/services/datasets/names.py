"""What datasets may be called, and what their bytes are by the name of the file they came in."""

from __future__ import annotations

from pathlib import PurePosixPath

from batchmill.errors import InvalidInput
from batchmill.services.datasets.records import CSV, OPENAI, PARQUET

CONNECTION = "file_uploads"  # where all uploads are; there is no other
NAME_CHARS_MAX = 256
UNFIT = "/\\?#%"  # of a URL that clients write names into as they are
FORMATS = {".csv": CSV, ".parquet": PARQUET}
MEDIA = {"text/csv": CSV, "application/vnd.apache.parquet": PARQUET}
PACKED = (".gz", ".zst")
_SHOWN_CHARS = 80


def checked_name(name: str) -> str:
    """Raises: InvalidInput (`invalid_dataset_name`)."""
    unfit = [char for char in name if char in UNFIT or not char.isprintable()]
    if not name or len(name) > NAME_CHARS_MAX or name.strip() != name or name in (".", "..") or unfit:
        holds = f": it holds {unfit[0]!r}" if unfit else ""
        raise InvalidInput(
            f"a dataset cannot be called {name[:_SHOWN_CHARS]!r}{holds}; give it a name of 1 to {NAME_CHARS_MAX} "
            f"printable characters without {' '.join(UNFIT)} and without spaces around it",
            code="invalid_dataset_name",
        )
    return name


def format_of(filename: str, media: str) -> str:
    """What bytes are that come under this file name and Content-Type: a table, or else batch rows."""
    found = FORMATS.get(PurePosixPath(unpacked(filename)).suffix.lower())
    return found or MEDIA.get(media.partition(";")[0].strip().lower(), OPENAI)


def extension_of(filename: str) -> str:
    """What stands behind the first point of a file name's last two: "jsonl", "csv.gz"; empty: nothing."""
    plain = unpacked(filename)
    suffix = PurePosixPath(plain).suffix + filename[len(plain) :]
    return suffix.lstrip(".")


def unpacked(filename: str) -> str:
    """The name without the suffix of what it is packed with."""
    return next((filename.removesuffix(each) for each in PACKED if filename.lower().endswith(each)), filename)
