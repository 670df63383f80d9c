"""Azure OpenAI's Files and Batches: OpenAI's, with another key and, before the v1 API, other names.

Source: Azure OpenAI's documentation, "Batch deployments" and its REST reference.
"""

from __future__ import annotations

from urllib.parse import quote

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch import settings
from batchmill.engines.provider_batch.openai import OpenAIBatches
from batchmill.engines.provider_batch.provider import JobRefused, TryAgain, Upload
from batchmill.engines.provider_batch.settings import Access
from batchmill.types import ModelSpec, RemoteJob

FILE_REST_S = 2.0  # between two looks at a file that is still being read there
_READING = frozenset({"pending", "running", "uploading", "notRunning"})
_BROKEN = frozenset({"error", "failed", "deleted", "canceled"})


class AzureBatches(OpenAIBatches):
    """`https://NAME.openai.azure.com/openai/v1`, or `https://NAME.openai.azure.com/openai` with `api_version`.

    A row's `model` is the name of a batch deployment.
    """

    arguments = OpenAIBatches.arguments | {"api_version"}

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        super().__init__(model, connections)
        self._version = settings.text(model, "api_version", self._access.query.get("api-version", ""))
        if self._version and not self._base.endswith("/openai"):
            self._base += "/openai"
        if self._version:
            self._access.query["api-version"] = self._version

    @staticmethod
    def _open(model: ModelSpec) -> Access:
        return Access(model, header="api-key", prefix="")

    def _endpoint(self, url: str) -> str:
        return url.removeprefix("/v1") if self._version else url

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        """As OpenAI's, once the file has been read there: a batch of one that has not is refused."""
        file = await self._get(self._url(f"/files/{quote(job.input, safe='')}"))
        status = file.get("status")
        if status in _READING:
            raise TryAgain("the uploaded file is still being read there", rest_s=FILE_REST_S, is_unseen=True)
        if status in _BROKEN:
            raise JobRefused(f"the uploaded file is refused: {file.get('status_details') or status}")
        return await super().create(job, upload)
