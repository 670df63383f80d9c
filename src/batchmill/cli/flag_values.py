"""The texts of KEY=VALUE flags and what they mean."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import click

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import is_too_deep

SPAN = re.compile(r"([1-9][0-9]{0,8})([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
OF_THE_PROMPT = ("messages", "prompt", "input", "instructions")  # fields of a body that --prompt and --system fill


def pairs(texts: Sequence[str], flag: str, bare: str | None = None) -> dict[str, str]:
    """KEY=VALUE texts; `bare` stands for the value of a KEY alone."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and bare is None):
            raise InvalidInput(f"{flag} is given as KEY=VALUE, not {text!r}")
        if name in found:
            raise InvalidInput(f"{flag} {name} is given twice")
        found[name] = value if equals else str(bare)
    return found


def scalar(text: str) -> str | int | float | bool:
    """A flag's value as it would stand in the configuration."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        # "007", "1_000", "inf" and "1.50" are texts: a flag must reach the engine as it was written.
        return value if math.isfinite(value) and str(value) == text else text
    return text


def request_fields(texts: Sequence[str], depth_max: int) -> dict[str, Any]:
    """What --param says: further fields of every request, each JSON, or text where it is no JSON."""
    found: dict[str, Any] = {}
    for name, text in pairs(texts, "--param").items():
        if name in OF_THE_PROMPT:
            raise InvalidInput(f"--param cannot set {name}: --prompt and --system say what each row asks")
        if is_too_deep(text.encode(errors="replace"), depth_max):
            raise InvalidInput(f"--param {name} is nested deeper than {depth_max} levels")
        try:
            found[name] = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        except ValueError:
            found[name] = text
        except _NotFinite as error:
            raise InvalidInput(f"--param {name} holds {error}, a number that JSON has no form for") from None
    return found


class _NotFinite(Exception):
    """A number that would reach the service as null."""


def _refuse_number(name: str) -> NoReturn:
    raise _NotFinite(name)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


class Past(click.ParamType):
    """A time that has been: a span before now (90m, 12h, 2d), or an ISO 8601 date and time, local without a zone."""

    name = "past"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = SPAN.fullmatch(str(value))
        try:
            if match is not None:
                return max(0.0, time.time() - int(match[1]) * SECONDS[match[2]])
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is no time: write 90m, 12h, 2d, or 2026-12-31T18:00", param, ctx)


class Moment(click.ParamType):
    """A time to come: a span from now (90m, 12h, 2d), or an ISO 8601 date and time, local where it names no zone."""

    name = "moment"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        now = time.time()
        match = SPAN.fullmatch(str(value))
        if match is not None:
            return now + int(match[1]) * SECONDS[match[2]]
        try:
            moment = datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is no time: write 90m, 12h, 2d, or 2026-12-31T18:00", param, ctx)
        if moment <= now:
            self.fail(f"{value} has passed", param, ctx)
        return moment
