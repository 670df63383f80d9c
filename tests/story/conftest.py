"""What every story with the openai package begins with: its client, at the server of the module."""

import pytest
from openai import OpenAI


@pytest.fixture
def client(server):
    with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client
