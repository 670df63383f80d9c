"""Removes the server's own paths from messages for callers: only the operator may see them."""

from __future__ import annotations

from pathlib import Path


class PathRedactor:
    """Redacts the paths of the data directory `data_dir`."""

    def __init__(self, data_dir: Path) -> None:
        self._folders = (f"{data_dir / 'files'}/", f"{data_dir / 'jobs'}/", f"{data_dir}/")

    def hide(self, text: str) -> str:
        """Return the text without the server's folders. Of a file's path only the file id is left."""
        for folder in self._folders:
            text = text.replace(folder, "")
        return text
