"""The settings of pip on this machine, and the same settings for uv.

uv reads no settings of pip. A machine on which pip is set up for its own index must install from that index with uv
too, so pip's files, its variables and the options of a requirements file are translated. uv is not used if pip has a
setting without an equivalent in uv. Source: pip.pypa.io/en/stable/topics/configuration, docs.astral.sh/uv/reference.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import ssl
import sysconfig
from collections.abc import Mapping

from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.models.worker_environment import USER_CODE

CONFIG = "PIP_CONFIG_FILE"
# Packages run their own code while they are built. Like functions, that code gets none of our keys.
_BUILD_VARIABLES = USER_CODE | {
    *(
        "XDG_CONFIG_DIRS",
        "CC",
        "CXX",
        "CFLAGS",
        "CXXFLAGS",
        "LDFLAGS",
        "PKG_CONFIG_PATH",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
    ),
    *("SSH_AUTH_SOCK", "SSL_CLIENT_CERT", "NETRC", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_INSECURE_HOST"),
    *("UV_EXTRA_INDEX_URL", "UV_KEYRING_PROVIDER", "UV_CONFIG_FILE", "UV_CACHE_DIR", "UV_LINK_MODE", "UV_OFFLINE"),
    *("UV_SYSTEM_CERTS", "UV_EXCLUDE_NEWER", "UV_PRERELEASE", "UV_TORCH_BACKEND"),
    "XDG_CONFIG_DIRS",
}
_BUILD_PREFIXES = ("PIP_", "GIT_", "LC_", "CMAKE_", "CARGO_", "RUSTUP_", "UV_INDEX", "UV_HTTP_", "UV_CONCURRENT_")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_SHORT = {"-i": "index-url", "-f": "find-links", "-r": "requirement", "-c": "constraint", "-e": "editable"}
_OTHER_FILES = {"requirement", "constraint", "editable"}
# Options of a requirements file. Source: pip.pypa.io/en/stable/reference/requirements-file-format.
_OPTIONS = {
    *("index-url", "pypi-url", "extra-index-url", "no-index", "find-links", "no-binary", "only-binary"),
    *("prefer-binary", "require-hashes", "pre", "trusted-host", "use-feature"),
}
_SWITCHES = {"no-index", "pre", "require-hashes", "prefer-binary"}
# Settings of pip as uv's variables, with the separator of several values.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "), "extra-index-url": ("UV_INDEX", " "), "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "), "cert": ("SSL_CERT_FILE", " "), "client-cert": ("SSL_CLIENT_CERT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "), "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "retries": ("UV_HTTP_RETRIES", " "),
}  # fmt: skip
_OLD_NAMES = {"UV_DEFAULT_INDEX": ("UV_INDEX_URL",), "UV_INDEX": ("UV_EXTRA_INDEX_URL",)}
_PATHS = {"find-links", "cert", "client-cert"}
# Settings of pip that change neither which packages are found nor what is installed.
_WITHOUT_EFFECT = {
    *("disable-pip-version-check", "no-input", "progress-bar", "quiet", "verbose", "log", "no-color", "cache-dir"),
    *("no-cache-dir", "require-virtualenv", "break-system-packages", "root-user-action", "no-warn-script-location"),
    *("no-python-version-warning", "compile", "no-compile", "exists-action", "use-feature", "upgrade", "debug"),
    *("require-hashes",),  # the installer passes it
}
_FALSE = ("0", "false", "no", "off", "f", "n", "")


class UvSettings(Struct, frozen=True):
    environ: dict[str, str]
    flags: list[str]
    files: list[str]  # files that uv reads


def environ_of(ours: Mapping[str, str]) -> dict[str, str]:
    """The variables that an installer gets."""
    return {name: value for name, value in ours.items() if name in _BUILD_VARIABLES or name.startswith(_BUILD_PREFIXES)}


def find_uv() -> str | None:
    """The uv of the environment in which batchmill is installed, or the one on the PATH."""
    bundled = os.path.join(sysconfig.get_path("scripts"), "uv")
    found = bundled if os.access(bundled, os.X_OK) else shutil.which("uv")
    return None if found is None else os.path.realpath(found)


def config_file(environ: Mapping[str, str]) -> str | None:
    """The file of pip's settings that has precedence; None if there is no file."""
    return next((path for path in reversed(_config_files(environ)) if os.path.isfile(path)), None)


def for_uv(options: list[str], environ: dict[str, str]) -> UvSettings | None:
    """Settings for uv: pip's, then uv's own variables, then the options of a requirements file, later ones win.

    Returns: None if one of them has no equivalent in uv.
    Raises: InvalidInput for options that cannot be read.
    """
    from_options = _translated(_by_name(options, environ))
    from_pip = None if (settings := _settings(environ)) is None else _translated(settings)
    if from_pip is None or from_options is None:
        return None
    environ = _with_pip(environ, from_pip[0])
    environ = _with_options(environ, from_options[0])
    bundle = environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE")
    if bundle and "SSL_CERT_FILE" not in from_pip[0]:
        environ["SSL_CERT_FILE"] = bundle
    verify_paths = ssl.get_default_verify_paths()
    if verify_paths.cafile or verify_paths.capath:  # pip trusts the system's certificates
        environ.setdefault("UV_SYSTEM_CERTS", "1")
    environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip treats all indexes as one
    config = environ.get("UV_CONFIG_FILE") or os.path.expanduser("~/.config/uv/uv.toml")
    has_config = os.path.isfile(config)
    environ |= (
        {"UV_CONFIG_FILE": config} if has_config else {"UV_NO_CONFIG": "1"}
    )  # not that of a project folder around us
    environ = {name: value for name, value in environ.items() if not name.startswith("PIP_")}
    return UvSettings(environ, list(dict.fromkeys([*from_pip[1], *from_options[1]])), [config] if has_config else [])


def _with_pip(environ: dict[str, str], variables: dict[str, str]) -> dict[str, str]:
    """Variables of uv that are set already have precedence over pip's settings."""
    result = dict(environ)
    for variable, value in variables.items():
        names = (variable, *_OLD_NAMES.get(variable, ()))
        if not variable.startswith("UV_") or not any(name in environ for name in names):
            result[variable] = value
    return result


def _with_options(environ: dict[str, str], variables: dict[str, str]) -> dict[str, str]:
    """Options of a requirements file replace the default index, and add to everything else."""
    result = dict(environ)
    for variable, value in variables.items():
        names = (variable, *_OLD_NAMES.get(variable, ()))
        earlier = [result.pop(name) for name in names if name in result]
        separator = "," if variable == "UV_FIND_LINKS" else " "
        is_single = variable == "UV_DEFAULT_INDEX"
        result[variable] = value.split()[-1] if is_single else separator.join([*earlier, value])
    return result


def check_options(lines: list[str]) -> None:
    """Raises: InvalidInput for an option of a requirements file that refers to another file, or is unknown."""
    for line, name in [(each, name) for each in lines for name in _by_name([each], {})]:
        if name in _OTHER_FILES:
            raise other_file(line)
        if name not in _OPTIONS:
            raise InvalidInput(
                f"the requirements have the option --{name[:80]}; they may have: "
                + ", ".join(f"--{each}" for each in sorted(_OPTIONS)),
                code="invalid_requirements",
            )


def other_file(line: str) -> InvalidInput:
    return InvalidInput(
        f"the requirement {line[:80]!r} refers to another file: write it out, or publish it as a package",
        code="invalid_requirements",
    )


def _by_name(lines: list[str], environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Options of a requirements file by name. Raises: InvalidInput."""
    options: dict[str, list[str]] = {}
    for line in lines:
        try:
            words = shlex.split(_VARIABLE.sub(lambda match: environ.get(match[1], match[0]), line))
        except ValueError as error:
            raise InvalidInput(f"the requirement {line[:80]!r}: {error}", code="invalid_requirements") from None
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word[:2] in _SHORT:  # "-i URL" or "-iURL"
                name, equals, value = _SHORT[word[:2]], word[2:], word[2:]
            else:
                name = name.removeprefix("--")
            if not equals and name not in _SWITCHES:
                value = words.pop(0) if words else ""
            options.setdefault(name, []).append(value or "1")
    return options


def _config_files(environ: Mapping[str, str]) -> list[str]:
    """Where pip looks for its settings; the last one has precedence."""
    chosen = environ.get(CONFIG, "")
    if chosen == os.devnull:
        return []
    of_user = [chosen] if os.path.exists(chosen) else ["~/.pip/pip.conf", "~/.config/pip/pip.conf"]
    folders = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    of_machine = [os.path.join(folder, "pip", "pip.conf") for folder in folders]
    return [os.path.expanduser(path) for path in (*of_machine, "/etc/pip.conf", *of_user)]


def _settings(environ: Mapping[str, str]) -> dict[str, list[str]] | None:
    """The settings in pip's files and variables by name; None if a file is malformed: pip reports that best."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in _config_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            return None
        for section, settings in sections.items():
            items = parser.items(section) if parser.has_section(section) else []
            settings |= {name.replace("_", "-").lstrip("-"): text for name, text in items}
    from_environ = {
        name[4:].lower().replace("_", "-"): text for name, text in environ.items() if name.startswith("PIP_")
    }
    merged = {
        **sections["global"],
        **sections["install"],
        **{name: text for name, text in from_environ.items() if text},
    }
    return {name: text.split() for name, text in merged.items() if name != "config-file"}


def _translated(settings: dict[str, list[str]]) -> tuple[dict[str, str], list[str]] | None:
    """Settings of pip as variables and flags of uv; None if one of them has no equivalent."""
    variables: dict[str, str] = {}
    flags: list[str] = []
    for name, values in settings.items():
        is_on = not values or values[-1].lower() not in _FALSE
        if name in _VARIABLES:
            variable, separator = _VARIABLES[name]
            variables[variable] = separator.join(map(_absolute, values) if name in _PATHS else values)
        elif name == "proxy" and values:
            variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), values[-1])
        elif name == "no-index":
            flags += ["--no-index"] if is_on else []
        elif name == "pre":
            flags += ["--prerelease=allow"] if is_on else []
        elif name in ("only-binary", "no-binary"):
            flags += [f"--{name}={each}" for value in values for each in value.split(",")]
        elif name not in _WITHOUT_EFFECT:
            return None
    return variables, flags


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
