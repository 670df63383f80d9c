"""A data directory with connectors, models of them and their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.config import KEY_FILE, Config, MlCommonsEntry, ServerEntry
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.remote.remote_services import RemoteServices, make_remote
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types import Caller, Scope

KEY = "sk-canary-0123456789abcdef"
US, THEM = Caller("default", Scope.ADMIN), Caller("other", Scope.ADMIN)


def connector_fields(**changes: Any) -> dict[str, Any]:
    """OpenAI's embeddings, as ML Commons' documentation has them."""
    fields: dict[str, Any] = {
        "name": "OpenAI embeddings",
        "version": 1,
        "protocol": "http",
        "parameters": {"model": "text-embedding-ada-002", "endpoint": "/v1/embeddings"},
        "credential": {"openAI_key": KEY},
        "actions": [
            {
                "action_type": "predict",
                "method": "POST",
                "url": "https://api.openai.com/v1/embeddings",
                "headers": {"Authorization": "Bearer ${credential.openAI_key}"},
                "request_body": '{ "input": ${parameters.input}, "model": "${parameters.model}" }',
                "pre_process_function": "connector.pre_process.openai.embedding",
                "post_process_function": "connector.post_process.openai.embedding",
            },
            {
                "action_type": "batch_predict",
                "method": "POST",
                "url": "https://api.openai.com/v1/batches",
                "headers": {"Authorization": "Bearer ${credential.openAI_key}"},
                "request_body": '{ "input_file_id": "${parameters.input_file_id}", "endpoint": '
                '"${parameters.endpoint}", "completion_window": "24h" }',
            },
        ],
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def at(url: str, **changes: Any) -> dict[str, Any]:
    """The same service somewhere else."""
    fields = connector_fields(**changes)
    for action in fields["actions"]:
        action["url"] = action["url"].replace("https://api.openai.com", url)
    return fields


class RemoteRoom:
    """`again` opens it as the next process does."""

    def __init__(self, folder: Path, *, private_hosts: tuple[str, ...] = (), **entry: Any) -> None:
        self.folder, self.clock = folder, HeldClock()
        self.config = Config(
            data_dir=folder,
            base=folder,
            server=ServerEntry(private_hosts=list(private_hosts)),
            ml_commons=MlCommonsEntry(**entry),
        )
        self.database: Database | None = None

    async def again(self) -> RemoteServices:
        if self.database is not None:
            await self.remote.close()
            self.database.close()
        self.database = open_database(self.folder / "batchmill.db")
        self.vault = Vault(self.database, SecretBox(self.folder / KEY_FILE), self.clock)
        self.directory = ModelDirectory(ConfiguredModels(self.config))
        self.remote = make_remote(self.config, self.database, self.vault, self.clock, self.directory)
        await self.remote.load()
        return self.remote

    async def secrets(self) -> list[str]:
        return [each.name for each in await self.vault.list()]

    async def close(self) -> None:
        if self.database is not None:
            await self.remote.close()
            self.database.close()
