"""Which version of which function the words of a URL mean: NAME, NAME@LABEL, and a version beside either."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.errors import UnknownName

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, Target
    from batchmill.types import Caller

LATEST = "latest"


def locate(functions: FunctionCalls, caller: Caller, model: str, version: str | None = None) -> Target:
    """The function that `model` means. A label is an alias, a version, or a branch whose "/" is written "~".

    Raises: UnknownName (`model_not_found`), in the same words for what is unknown and for what is not the caller's.
    """
    name, _, label = model.partition("@")
    if not label:
        return functions.find(caller, name, None, version or LATEST)
    branch = label.replace("~", "/")
    if version is not None:
        return functions.find(caller, name, branch, version)
    try:
        return functions.find(caller, name, None, label)
    except UnknownName as unknown:
        try:
            return functions.find(caller, name, branch, LATEST)
        except UnknownName:
            raise unknown from None
