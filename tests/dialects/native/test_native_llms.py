"""Deployed language models over batchmill's own API, by way of the SDK's calls."""

import msgspec
import pytest
from services.llm_room import TOKEN, US, LlmRoom

from batchmill.client import llm_calls
from batchmill.errors import InvalidInput
from batchmill.services.llms import views
from batchmill.types import LlmSettings, Scaling
from batchmill.wire.native_models import LlmChange, NewLlm


@pytest.fixture
async def room(tmp_path):
    room = LlmRoom(tmp_path)
    await room.again()
    yield room
    await room.close()


def test_a_misspelt_field_is_named():
    """Nothing is sent that the server would refuse for its name."""
    with pytest.raises(InvalidInput, match="did you mean 'replicas_max'"):
        llm_calls.filled(NewLlm, {"replica_max": 2}, name="d", base_model="tiny")


def test_what_is_not_said_is_not_sent():
    """A change holds what is to be changed: null is something else than nothing."""
    ask = llm_calls.change("a b", LlmChange(cooldown_s=None, replicas_min=1))
    assert ask.request.path.endswith("/llms/a%20b")
    assert msgspec.json.decode(ask.request.body) == {"cooldown_s": None, "replicas_min": 1}


@pytest.mark.parametrize(
    ("expected", "scaling"),
    [
        ({"replicas_min": 3}, Scaling(3, 3, 60.0)),
        ({"cooldown_s": None}, Scaling(1, 2)),
        ({"replicas_max": 5}, Scaling(1, 5, 60.0)),
        ({"replicas_min": None}, Scaling(0, 2, 60.0)),
    ],
)
def test_a_change_of_replicas(expected, scaling):
    """What is said is changed, null is the default, and a least number raises the most where that is not said."""
    before = LlmSettings("tiny", scaling=Scaling(1, 2, 60.0))
    found = views.changed_settings(before, LlmChange(**expected))
    assert found is not None and found.scaling == scaling
    assert views.changed_settings(before, LlmChange(description="x")) is None


async def test_a_token_is_not_in_what_is_shown(room):
    """That there is one is said, and nothing of it."""
    request = NewLlm("d", "tiny", hf_token=TOKEN)
    assert TOKEN not in repr(request)
    made = await room.llms.create(US, "d", views.settings_of(request))
    info = views.info(made, room.llms.view(made))
    assert info.has_hf_token and b"hf_" + TOKEN[3:].encode() not in msgspec.json.encode(info)
    assert info.engine_args == {} and info.price is not None
