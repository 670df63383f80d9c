"""The dialects by name, in the order in which they are asked whose a path is. A new one is one folder and one row."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from batchmill.optional import require

if TYPE_CHECKING:
    from batchmill.dialects.open_inference.grpc.server import GrpcServer
    from batchmill.server.access_log import Served
    from batchmill.server.admission_control import Admission
    from batchmill.server.auth import Gate
    from batchmill.server.operations import Dialect
    from batchmill.services.services import Services

DIALECTS = {
    "openai": "batchmill.dialects.openai.dialect:OpenAIDialect",
    "modelbit": "batchmill.dialects.modelbit.dialect:ModelbitDialect",
    "open_inference": "batchmill.dialects.open_inference.dialect:OpenInferenceDialect",
    "inferless": "batchmill.dialects.inferless:InferlessDialect",
    "ml_commons": "batchmill.dialects.ml_commons.dialect:MlCommonsDialect",
    "predibase": "batchmill.dialects.predibase.dialect:PredibaseDialect",
    "native": "batchmill.dialects.native.dialect:NativeDialect",
}
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"  # a variable that grpc reads when it is imported
FALLBACK = "native"  # whose error form a path has that belongs to none


def load_dialects(services: Services, names: Sequence[str] = tuple(DIALECTS)) -> list[Dialect]:
    """The dialects with these names, in the order of the table."""
    loaded = []
    for name in names:
        module, _, attribute = DIALECTS[name].partition(":")
        loaded.append(getattr(import_module(module), attribute)(services))
    return loaded


def load_grpc(
    services: Services, gate: Gate, admission: Admission, watchers: Sequence[Callable[[Served], None]]
) -> GrpcServer:
    """The frontend of `server.grpc_port`, not open yet. Raises: InvalidConfig where its packages are missing."""
    with _no_fork_support():
        server_class = require("batchmill.dialects.open_inference.grpc.server:GrpcServer", "server.grpc_port")
    return server_class(services, gate, admission, watchers)


@contextlib.contextmanager
def _no_fork_support() -> Iterator[None]:
    """Nothing of ours forks without running another program; grpc would log a line whenever a process is started."""
    had = os.environ.get(FORK_SUPPORT)
    os.environ[FORK_SUPPORT] = "0"
    try:
        yield
    finally:
        if had is None:
            del os.environ[FORK_SUPPORT]
        else:
            os.environ[FORK_SUPPORT] = had
