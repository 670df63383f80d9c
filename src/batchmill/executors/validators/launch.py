"""How the process of a class is started: with the environment of its version, and in a sandbox if one is configured."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from msgspec import Struct

from batchmill.errors import ModelFailed
from batchmill.executors.validators.messages import LoadOrder
from batchmill.models import functions, isolation
from batchmill.models.runtime_process import PROGRAM, sandbox_prefix
from batchmill.models.worker_environment import USER_CODE, inherited
from batchmill.types import Isolation

PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of code that is used where it lies


class LaunchCommand(Struct, frozen=True):
    words: list[str]
    environ: Mapping[str, str]
    folder: str | None


def command_of(order: LoadOrder, sandbox: Isolation | None) -> LaunchCommand:
    """Blocks. Raises: ModelFailed for code that has changed, is gone, or cannot be isolated."""
    if order.folder:
        return _deployed(order, sandbox)
    if order.code and functions.digest_with_imports(order.source) != order.code:
        raise ModelFailed(f"the code of {order.source} has changed since the job began: run it as a new job")
    words = [sys.executable, str(PROGRAM), "validate", str(os.getpid())]
    return LaunchCommand(words, _environ(PYTHON), None)


def _deployed(order: LoadOrder, sandbox: Isolation | None) -> LaunchCommand:
    if not os.path.isdir(order.folder):
        raise ModelFailed(
            f"the code of {order.source} is gone: the version was removed, or its files were. Deploy it again, and "
            "start a new job with it"
        )
    python = order.python or sys.executable
    environ = _environ(()) | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # its folder never changes
    if sandbox is None:
        return LaunchCommand([python, str(PROGRAM), "validate", str(os.getpid())], environ, order.folder)
    prefix = sandbox_prefix(sandbox, python, order.folder, gpus=0)
    return LaunchCommand([*prefix, python, str(PROGRAM), "validate", "0"], isolation.environ(environ), None)


def _environ(more: tuple[str, ...]) -> dict[str, str]:
    """Without the variables that hold keys."""
    names = (*USER_CODE, *more)
    return {name: value for name, value in inherited().items() if name in names or name.startswith("LC_")}
