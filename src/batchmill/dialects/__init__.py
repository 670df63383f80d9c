"""The dialects by name, in the order in which the server matches a path. A new dialect is one folder and one row."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from batchmill.optional import require

if TYPE_CHECKING:
    from batchmill.dialects.open_inference.grpc.server import GrpcServer
    from batchmill.server.access_log import RequestRecord
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
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"  # grpc reads this variable when it is imported
FALLBACK = "native"  # the dialect that refuses a path that belongs to no dialect


def load_dialects(services: Services, names: Sequence[str] = tuple(DIALECTS)) -> list[Dialect]:
    """Import and create the dialects with these names, in the order of `names`."""
    loaded = []
    for name in names:
        module, _, attribute = DIALECTS[name].partition(":")
        loaded.append(getattr(import_module(module), attribute)(services))
    return loaded


def load_grpc(
    services: Services, gate: Gate, admission: Admission, watchers: Sequence[Callable[[RequestRecord], None]]
) -> GrpcServer:
    """Create the gRPC server of `server.grpc_port`; it does not listen yet.

    Raises: InvalidConfig if its packages are missing.
    """
    with _no_fork_support():
        server_class = require("batchmill.dialects.open_inference.grpc.server:GrpcServer", "server.grpc_port")
    return server_class(services, gate, admission, watchers)


@contextlib.contextmanager
def _no_fork_support() -> Iterator[None]:
    """Turn grpc's fork support off: batchmill only forks to exec, and grpc logs a line for each started process."""
    previous_value = os.environ.get(FORK_SUPPORT)
    os.environ[FORK_SUPPORT] = "0"
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[FORK_SUPPORT]
        else:
            os.environ[FORK_SUPPORT] = previous_value
