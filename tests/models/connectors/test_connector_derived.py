"""Actions that follow from others. Numbers are those of the reference's cases."""

import pytest
from connector_samples import KEY, action, connector

from batchmill.errors import InvalidInput
from batchmill.models.connectors.rendering import Renderer
from batchmill.models.connectors.urls import find_action, provider_of, remote_parameters

OPENAI = "https://api.openai.com/v1/batches"
COHERE = "https://api.cohere.ai/v1/embed-jobs"
SAGEMAKER = "https://api.sagemaker.us-east-1.amazonaws.com/CreateTransformJob"
BEDROCK = "https://bedrock.${parameters.region}.amazonaws.com/model-invocation-job"
HOST = "https://bedrock.us-east-1.amazonaws.com/model-invocation-job"
TRANSFORM = '{ "TransformJobName" : "${parameters.TransformJobName}"}'
STATUS, CANCEL = "BATCH_PREDICT_STATUS", "CANCEL_BATCH_PREDICT"

# URL of batch_predict, kind, method, URL, body.
CASES = {
    "17": (OPENAI, STATUS, "GET", OPENAI + "/${parameters.id}", None),
    "21": (OPENAI, CANCEL, "POST", OPENAI + "/${parameters.id}/cancel", None),
    "18 cohere": (COHERE, STATUS, "GET", COHERE + "/${parameters.id}", None),
    "22 cohere": (COHERE, CANCEL, "POST", COHERE + "/${parameters.id}/cancel", None),
    "19": (SAGEMAKER, STATUS, "POST", SAGEMAKER.replace("Create", "Describe"), TRANSFORM),
    "20": (SAGEMAKER, CANCEL, "POST", SAGEMAKER.replace("Create", "Stop"), TRANSFORM),
    "bedrock": (BEDROCK, STATUS, "GET", HOST + "/${parameters.processedJobArn}", None),
    "bedrock, cancel": (BEDROCK, CANCEL, "POST", HOST + "/${parameters.processedJobArn}/stop", None),
    "a query": (OPENAI + "?api-version=1", STATUS, "GET", OPENAI + "/${parameters.id}?api-version=1", None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_actions_follow(case):
    """Status and cancel of the four providers follow from how a batch is begun."""
    url, kind, method, there, request_body = case
    found = find_action(connector(action("batch_predict", url=url), parameters={"region": "us-east-1"}), kind)
    assert (found.action_type, found.method, found.url, found.request_body) == (kind, method, there, request_body)
    assert found.headers == KEY


def test_19_no_parameters_are_needed():
    """A connector without parameters has its actions derived too."""
    assert find_action(connector(action("batch_predict", url=SAGEMAKER)), STATUS).url.endswith("/DescribeTransformJob")


def test_explicit_actions_count():
    """An action that is given is taken as it is, without a body and whatever its host."""
    given = action("batch_predict_status", method="GET", url="https://my.host/jobs/${parameters.id}", request_body=None)
    found = find_action(connector(action("batch_predict"), given), STATUS)
    assert (found.url, found.method, found.request_body) == ("https://my.host/jobs/${parameters.id}", "GET", None)


def test_headers_are_its_own_or_predicts():
    """An action's own headers are sent; where it has none, those of predict."""
    own = action("batch_predict", headers={"X": "1"})
    assert find_action(connector(action(), own), "BATCH_PREDICT").headers == {"X": "1"}
    assert find_action(connector(action(), action("batch_predict", headers=None)), "BATCH_PREDICT").headers == KEY
    assert find_action(connector(action("batch_predict", headers=None)), "BATCH_PREDICT").headers == {}
    bare = connector(action(), action("batch_predict", headers=None, url=OPENAI))
    assert find_action(bare, STATUS).headers == KEY


def test_actions_are_found_by_name():
    """A name that is not a type stands for the first action that has it."""
    made = connector(action(), action("execute", name="warm-up", url="https://a.b/warm"))
    assert find_action(made, "warm-up").url == "https://a.b/warm"


REFUSED = {
    "23": (
        "https://unknown.example/v1/batches",
        CANCEL,
        "Please configure the action type to cancel the batch job in the connector",
    ),
    "24": (
        "https://unknown.example/v1/batches",
        STATUS,
        "Please configure the action type to get the batch job details in the connector",
    ),
    "no such": (OPENAI, "EXECUTE", "no EXECUTE action found"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_actions_that_nobody_knows(case):
    """Where nothing follows, the message says what to configure."""
    url, kind, message = case
    with pytest.raises(InvalidInput) as caught:
        find_action(connector(action("batch_predict", url=url)), kind)
    assert (caught.value.code, caught.value.message) == ("unknown_action", message)


def test_nothing_follows_from_nothing():
    """Without batch_predict there is neither a batch nor its status."""
    for kind in ("BATCH_PREDICT", STATUS, CANCEL):
        with pytest.raises(InvalidInput, match="^no BATCH_PREDICT action found$"):
            find_action(connector(action()), kind)


@pytest.mark.parametrize(
    ("url", "parameters", "expected"),
    [
        (OPENAI, None, "openai"),
        ("https://x.openai.azure.com/openai/v1/batches", None, "openai"),
        (SAGEMAKER, None, "sagemaker"),
        (BEDROCK, {"region": "eu-1"}, "bedrock"),
        ("https://my.host/v1/batches", None, None),
        ("https://my.host/v1/batches", {"provider": "openai"}, "openai"),
        ("https://my.host/v1/batches", {"provider": "Azure"}, "openai"),
        ("https://my.host/v1/batches", {"provider": "mine"}, None),
    ],
)
def test_providers_are_told_by_url(url, parameters, expected):
    """A provider is known by its name in the URL, or because the connector says so."""
    assert provider_of(connector(action("batch_predict", url=url), parameters=parameters)) == expected


ARN = "arn:aws:sagemaker:us-east-1:1:transform-job/my-job"
REMOTE = {
    "71": ({"TransformJobArn": ARN}, {"TransformJobArn": ARN, "TransformJobName": "my-job"}),
    "72 the name is there": (
        {"TransformJobArn": ARN, "TransformJobName": "x"},
        {"TransformJobArn": ARN, "TransformJobName": "x"},
    ),
    "bedrock": ({"jobArn": "a/b"}, {"jobArn": "a/b", "processedJobArn": "a%2Fb"}),
    "cohere": ({"job_id": "j1"}, {"job_id": "j1", "id": "j1"}),
    "only text": ({"id": "b1", "n": 1, "o": {}, "z": None, "l": [], "t": True}, {"id": "b1"}),
}


@pytest.mark.parametrize("case", REMOTE.values(), ids=REMOTE)
def test_remote_jobs_become_parameters(case):
    """The text that a remote job says of itself is what its status and its end are asked with."""
    remote_job, expected = case
    assert remote_parameters(remote_job) == expected


def test_a_remote_job_has_no_word_in_the_host():
    """OpenAI's `endpoint` of a batch does not become the host that a status URL is filled with."""
    made = connector(
        action("batch_predict", url=OPENAI),
        action(STATUS, method="GET", url="https://${parameters.endpoint}/v1/batches/${parameters.id}"),
        parameters={"endpoint": "api.openai.com"},
    )
    remote = remote_parameters({"id": "batch/1", "endpoint": "/v1/embeddings"})
    call = Renderer(made, find_action(made, STATUS)).render({"input": "x"} | remote, {"key": "k"})
    assert call.url == "https://api.openai.com/v1/batches/batch%2F1"


def test_71_a_transform_job_is_asked_for_by_name():
    """The status of a SageMaker job is asked for with the name from its ARN."""
    made = connector(action("batch_predict", url=SAGEMAKER))
    call = Renderer(made, find_action(made, STATUS)).render(remote_parameters({"TransformJobArn": ARN}), {"key": "k"})
    assert call.body == b'{ "TransformJobName" : "my-job"}'
