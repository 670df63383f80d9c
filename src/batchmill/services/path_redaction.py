"""Where things lie on the server is nobody's business but its operator's: sentences for callers go without."""

from __future__ import annotations

from pathlib import Path


class Places:
    """What is told to clients of a server whose files lie in `data_dir`."""

    def __init__(self, data_dir: Path) -> None:
        self._folders = (f"{data_dir / 'files'}/", f"{data_dir / 'jobs'}/", f"{data_dir}/")

    def hide(self, text: str) -> str:
        """A sentence without the folders of the server: what is left of a file is its id."""
        for folder in self._folders:
            text = text.replace(folder, "")
        return text
