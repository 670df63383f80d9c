"""Parses the values of options and arguments: durations, times, sizes, text."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from datetime import datetime
from typing import Any

import click

from batchmill.cli.session import refuse_non_utf8
from batchmill.errors import InvalidConfig
from batchmill.types.machines import size_of

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*(ms|[smhdw])?")
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)


def duration_s(text: str, *, default_unit: str | None = None) -> float | None:
    """The seconds of 30s, 5ms, 12h, 90d or 4w; None if `text` is not one. A bare number needs `default_unit`."""
    match = _DURATION.fullmatch(text)
    unit = None if match is None else match[2] or default_unit
    return None if match is None or unit is None else float(match[1]) * UNITS_S[unit]


class Duration(click.ParamType):
    """Seconds. Args: examples: shown if the value is refused."""

    name = "span"

    def __init__(self, examples: str, *, default_unit: str | None = None) -> None:
        self._examples, self._default_unit = examples, default_unit

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = duration_s(str(value), default_unit=self._default_unit)
        if seconds is None or (seconds == 0 and self._default_unit is None):
            self.fail(f"{value!r} is not a duration: write {self._examples}", param, ctx)
        return seconds


CALL_TIME = Duration("30s, 5ms, 2m", default_unit="s")
LONG_TIME = Duration("90d, 12h, 30m, 4w")


class _Time(click.ParamType):
    """Seconds since the epoch: a duration from now, or an ISO 8601 date and time, local without a time zone."""

    sign = 1

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = duration_s(str(value))
        if seconds:
            return max(0.0, time.time() + self.sign * seconds)
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is not a time: write 90m, 12h, 2d, or 2026-12-31T18:00", param, ctx)


class Past(_Time):
    """A time in the past: a duration before now, or a date and time."""

    name = "past"
    sign = -1


class Moment(_Time):
    """A time in the future: a duration from now, or a date and time."""

    name = "moment"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        moment = super().convert(value, param, ctx)
        if moment <= time.time():
            self.fail(f"{value} is in the past", param, ctx)
        return moment


class NameList(click.ParamType):
    """Some of these names, between commas."""

    name = "names"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        found = [name.strip() for name in str(value).split(",")]
        for name in found:
            if name not in self._names:
                self.fail(f"{name!r} is none of {', '.join(self._names)}", param, ctx)
        return list(dict.fromkeys(found))


class ByteCount(click.ParamType):
    """Bytes: 512MB, 2GiB, 1000000."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return size_of(str(value), "a size")
        except InvalidConfig:
            self.fail(f"{value!r} is not a size: write 512MB, 2GiB", param, ctx)


def utf8(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse text that is not UTF-8; a callback of options and arguments."""
    if isinstance(value, tuple):
        return tuple(refuse_non_utf8(each) for each in value)
    return None if value is None else refuse_non_utf8(value)
