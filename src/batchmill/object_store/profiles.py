"""Credentials of Amazon's profiles, by botocore: files in ~/.aws, SSO, processes, assumed roles."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import BotoCoreError
from botocore.session import Session

from batchmill.object_store.credentials import (
    CONFIG_FILE,
    CREDENTIALS_FILE,
    PROFILE,
    Provider,
    Variables,
    expires_at,
    no_credentials,
)

SETTINGS = {CREDENTIALS_FILE: "credentials_file", CONFIG_FILE: "config_file"}


def provide(environment: Variables) -> tuple[Provider, str | None]:
    """(what gives credentials, the region of the profile). Raises: AuthRefused."""
    try:
        session = Session(profile=environment.get(PROFILE))
        for name, setting in SETTINGS.items():
            if environment.get(name):
                session.set_config_variable(setting, environment[name])
        credentials = session.get_credentials()
        region = session.get_config_variable("region")
    except BotoCoreError as error:
        raise no_credentials(str(error)) from None
    if credentials is None:
        raise no_credentials("the profile has none")

    def read() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # refreshes them when they are about to expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires_at(),
        }

    return read, region
