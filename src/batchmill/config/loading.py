"""A configuration as it was told: where the file lies, what stands in it, and what goes before it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import fields, replace

from batchmill.config.checks import check_keys, check_values, one_count
from batchmill.config.entries import Config, File
from batchmill.errors import InvalidConfig

FILE_NAME = "batchmill.toml"
FILE_BYTES_MAX = 4 * 1024 * 1024


def load(
    *,
    environ: Mapping[str, str],
    cwd: Path,
    data_dir: str | None = None,
    config_file: str | None = None,
    reads_file: bool = True,
) -> Config:
    """The configuration of a command started in `cwd`; `data_dir` and `config_file` are its flags.

    Args: reads_file: False for a command that works at a server, whose configuration is the server's own.

    Raises: InvalidConfig, naming the file, the key and the way out.
    """
    path = _config_path(config_file or environ.get("BATCHMILL_CONFIG"), cwd) if reads_file else None
    read = File() if path is None else _read(path)
    base = cwd if path is None else path.parent
    chosen = data_dir or environ.get("BATCHMILL_DATA_DIR")
    if chosen:
        place = cwd / Path(chosen).expanduser()
    elif read.data_dir is not None:
        place = base / Path(read.data_dir).expanduser()
    else:
        place = _default_data_dir(environ)
    key_file = _place(environ.get("BATCHMILL_SECRETS_KEY_FILE"), cwd) or _place(read.secrets.key_file, base)
    paths = ("data_dir", "secrets")
    kept = {each.name: getattr(read, each.name) for each in fields(File) if each.name not in paths}
    return Config(data_dir=place.resolve(), base=base, file=path, key_file=key_file, **kept)


def _place(told: str | None, base: Path) -> Path | None:
    """Its last part is not resolved: a key file that is a link is refused."""
    return (base / Path(told).expanduser()).absolute() if told else None


def _default_data_dir(environ: Mapping[str, str]) -> Path:
    """The XDG base directory specification: a relative XDG_DATA_HOME counts as unset."""
    told = environ.get("XDG_DATA_HOME", "")
    home = Path(told) if told.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".local/share"
    return home / "batchmill"


def _config_path(named: str | None, cwd: Path) -> Path | None:
    if named:
        return (cwd / Path(named).expanduser()).resolve()
    found = cwd / FILE_NAME
    return found.resolve() if found.exists() else None


def _read(path: Path) -> File:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfig(f"the configuration file {path} cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfig(f"the configuration file {path} is longer than {FILE_BYTES_MAX:,} bytes")
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not TOML: {error}") from None
    try:
        check_keys(table)
        read = msgspec.convert(table, File)
        read = replace(read, models={name: one_count(name, each) for name, each in read.models.items()})
        check_values(read)
    except (msgspec.ValidationError, InvalidConfig) as error:
        raise InvalidConfig(f"{path}: {error}") from None
    return read
