"""What a delivery is signed with, as those who verify it understand it."""

import json
import time

import pytest
from openai import OpenAI
from standardwebhooks import Webhook, WebhookVerificationError

from batchmill.errors import InvalidInput
from batchmill.models.secrets import Secret
from batchmill.services.webhooks.sender import check_secret, hint_of, new_secret, signed_headers

BODY = json.dumps({"id": "evt_1", "type": "batch.completed", "data": {"id": "batch_ü"}}).encode()


def test_openai_and_standard_webhooks_verify_a_delivery():
    """The published packages accept what is signed, and nothing that was changed on its way."""
    secret = new_secret()
    headers = signed_headers("msg_1", int(time.time()), BODY, [secret])
    with OpenAI(api_key="x", webhook_secret=secret.reveal()) as client:
        assert client.webhooks.unwrap(BODY, headers).type == "batch.completed"
    Webhook(secret.reveal()).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret.reveal()).verify(BODY + b" ", headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret().reveal()).verify(BODY, headers)


def test_a_rotated_secret_is_verified_with_either():
    """While two secrets are valid a receiver may hold the old or the new one."""
    old, new = new_secret(), new_secret()
    headers = signed_headers("msg_1", int(time.time()), BODY, [new, old])
    for each in (old, new):
        Webhook(each.reveal()).verify(BODY, headers)
    assert headers["webhook-signature"].count("v1,") == 2


@pytest.mark.parametrize(
    "text", ["", "hunter2hunter2", "whsec_AAAA", "whsec_" + "A" * 200, "whsec_" + "!" * 44, "WHSEC_" + "A" * 44]
)
def test_a_secret_nobody_could_verify_with_is_refused(text: str):
    """A secret without its prefix, too short, too long or no base64 is refused without being shown."""
    with pytest.raises(InvalidInput) as refused:
        check_secret(Secret(text))
    assert not text or text not in refused.value.message


def test_a_hint_shows_the_end_only():
    """A hint is enough to tell secrets apart and too little to sign with."""
    secret = new_secret()
    check_secret(secret)
    assert hint_of(secret) == "whsec_…" + secret.reveal()[-4:]
