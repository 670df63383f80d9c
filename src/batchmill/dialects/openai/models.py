"""/v1/models: every model the caller may use, and its adapters beside it. Source: OpenAI's API reference, "Models"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from starlette.responses import Response

from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.model_rows import Served
from batchmill.services.services import Services
from batchmill.types import Scope


class Model(Struct, frozen=True):
    id: str
    created: int
    parent: str | None  # of an adapter: the model it belongs to
    owned_by: str = "batchmill"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Models:
    def __init__(self, services: Services) -> None:
        self._directory = services.directory
        self._created = int(services.clock.now())  # the configuration was read with the server's start

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "listModels", "GET", "/v1/models", "Models and adapters", Scope.READ, self.list, reply=ModelList
            ),
            # A name may hold slashes: "org/model".
            Operation(
                "retrieveModel", "GET", "/v1/models/{model:path}", "One model or adapter", Scope.READ, self.retrieve,
                reply=Model, errors=(404,),
            ),
        )  # fmt: skip

    async def list(self, call: Call) -> Response:
        return json_reply(ModelList([self._model(served) for served in self._directory.list(call.caller)]))

    async def retrieve(self, call: Call) -> Response:
        return json_reply(self._model(self._directory.find(call.caller, call.path["model"])))

    def _model(self, served: Served) -> Model:
        return Model(served.name, self._created, served.model.name if served.adapter else None)
