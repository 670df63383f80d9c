"""What the tests of deploy/ read: files, YAML, and the parts of a configuration that this version knows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import yaml

from batchmill.config.checks import File

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).parent / "schemas"
PAGE = (ROOT / "docs" / "deploy.md").read_text()
PORT = 8000  # of the server, in its container
USER = 10001  # of the images


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def known_tables(path: Path) -> str:
    """A configuration without those tables of a cluster that this build does not have."""
    fields = {field.name for field in msgspec.structs.fields(File)}
    text = path.read_text()
    tomllib.loads(text)
    for name in {"cluster", "database", "storage"} - fields:
        text = re.sub(rf"^\[{name}\]\n(?:[^\[\n].*\n|\n)*", "", text, flags=re.MULTILINE)
    return text


def walk(value: Any) -> list[Any]:
    """A value and everything in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for each in inner for found in walk(each))]
