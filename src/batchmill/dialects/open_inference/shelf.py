"""The versions that this protocol shows without being asked for one: those of branch main that a caller may use."""

from __future__ import annotations

from batchmill.services.functions.calls import FunctionCalls, Target
from batchmill.types import Caller

BRANCH = "main"


def targets_of(functions: FunctionCalls, caller: Caller, name: str | None = None, branch: str = BRANCH) -> list[Target]:
    """Every version that can be called, of every function or of one, by name and number."""
    found = [each for each in functions.targets(caller) if each.branch == branch and name in (None, each.name)]
    return sorted(found, key=lambda each: (each.name, each.number))
