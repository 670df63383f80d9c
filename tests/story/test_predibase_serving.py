"""The published predibase package, as it is, against a server: deployments, generate, stream, classify, OpenAI's base.

Engines are the fake one, whose answers are the prompt; `test_real_vllm.py` has the real one.
"""

from __future__ import annotations

import pytest
from dialects.predibase.llm_server import config_of
from engines.llm_support import FakeVllm
from predibase_package import Package
from running_server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predibase-serving")
    fake = FakeVllm(folder / "fake")
    (folder / "batchmill.toml").write_text(config_of(fake))
    names = ("PYTHONPATH", "FAKE_ONCE", "FAKE_CALLS", "FAKE_HEALTH_DELAY_S")
    with RunningServer(folder, env={name: fake.env[name] for name in names}) as running:
        yield running


@pytest.fixture(scope="module")
def package(server):
    return Package(server)


def test_generate_and_stream(package):
    """Texts, tokens with their log-probabilities, adapters, streams: as the package's own structs read them."""
    plain, full, loud, streamed, later, waited = package.results(
        "client('tiny').generate('abc', details=False)",
        "client('tiny').generate('ab', decoder_input_details=True, return_k_alternatives=2, stop_sequences=['b'])",
        "client('tiny').generate('abc', adapter_id='upper', adapter_source='pbase', max_new_tokens=2)",
        "list(client('tiny').generate_stream('abc', adapter_id='reverse'))",
        "asyncio.run(pb.deployments.async_client('tiny', serving_url=URL).generate('abc', temperature=0.5, seed=3))",
        "pb.deployments.client('tiny', serving_url_override=URL).generate('abc').generated_text",
    )
    assert plain == {"generated_text": "abc", "details": None}
    details = full["details"]
    assert (full["generated_text"], details["finish_reason"], details["prompt_tokens"]) == ("ab", "stop_sequence", 3)
    assert [each["text"] for each in details["prefill"]] == ["<s>", "a", "b"]
    assert [each["text"] for each in details["tokens"][0]["alternative_tokens"]] == ["a", "A"]
    assert loud["generated_text"] == "AB" and loud["details"]["finish_reason"] == "length"
    assert "".join(each["token"]["text"] for each in streamed if not each["token"]["special"]) == "cba"
    assert streamed[-1]["generated_text"] == "cba" and streamed[-1]["details"]["generated_tokens"] == 4
    assert later["details"]["seed"] == 3 and waited == "abc"


def test_classify(package):
    """A model that classifies; the package sends an empty token and no model."""
    (result,) = package.results("client('sorter').classify(['A', 'b'])")
    assert [each["label"] for each in result["data"]] == ["loud", "quiet"]
    assert result["model"] == "sorter"


def test_errors_become_the_packages_exceptions(package):
    """Each by its own class, at once and with the words of what is wrong."""
    reply = package.ask(
        "client('tiny').generate('abc', typical_p=0.5)",
        "client('tiny').generate('abc', adapter_id='nobody')",
        "client('tiny').generate('abc', api_token='hf_secret')",
        "client('nothing').generate('abc')",
        "client('tiny').generate('fails: it')",
        "client('tiny').classify('a')",
        "list(client('tiny').generate_stream('abc', adapter_source='local', adapter_id='/etc'))",
    )
    kinds = ["ValidationError", "NotFoundError", "ValidationError", "NotFoundError", "GenerationError"]
    assert [each["kind"] for each in reply] == [*kinds, "NotFoundError", "ValidationError"]
    words = ("typical_p", "nobody", "api_token", "nothing", "it always fails", "", "local")
    assert all(word in each["error"] for word, each in zip(words, reply, strict=True)), reply
    assert "hf_secret" not in str(reply)


def test_openai_base(package):
    """The openai package at the deployment's address: `model` is empty or an adapter."""
    chat = "[{'role': 'user', 'content': 'a b'}]"
    base, loud, whole, streamed, vector = package.results(
        f"openai('tiny').chat.completions.create(model='', messages={chat}).choices[0].message.content",
        f"openai('tiny').chat.completions.create(model='upper', messages={chat}).choices[0].message.content",
        "openai('tiny').completions.create(model='reverse', prompt='abc', max_tokens=9).choices[0].text",
        "[each.choices[0].delta.content for each in "
        f"openai('tiny').chat.completions.create(model='upper', messages={chat}, stream=True)]",
        "openai('sorter').embeddings.create(model='', input='a', encoding_format='float').data[0].embedding",
    )
    assert (base, loud, whole, streamed, vector) == ("a b", "A B", "cba", ["A", "B"], [0.25, -1.5])
    reply = package.ask(f"openai('tiny').chat.completions.create(model='nobody', messages={chat})")
    assert reply[0]["kind"] == "NotFoundError" and "nobody" in reply[0]["error"]


def test_deployments(package):
    """Made and waited for, looked at, changed, called, used for a job's config, deleted: each by the package."""
    config = "DeploymentConfig(base_model='tiny', max_total_tokens=512, hf_token='hf_secret', cooldown_time=60)"
    made, listed, called, changed, found, job, gone, missing = package.ask(
        f"pb.deployments.create('mine', config={config}, description='ours')",
        "[each.name for each in pb.deployments.list(type='private')]",
        "pb.deployments.client('mine', serving_url_override=URL).generate('abc', adapter_id='upper').generated_text",
        "pb.deployments.update('mine', config=UpdateDeploymentConfig(max_total_tokens=256), description='changed')",
        "pb.deployments.get('mine')",
        "BatchInferenceServerConfig.from_deployment(pb.deployments.get('mine')).model_dump(by_alias=True)",
        "pb.deployments.delete('mine')",
        "pb.deployments.get('mine')",
    )
    assert made["result"]["status"] == "ready" and made["result"]["context_window"] == 512, made
    assert "Ready" in made["said"]
    assert (listed["result"], called["result"]) == (["mine"], "ABC")
    assert "error" not in changed and found["result"]["context_window"] == 256, (changed, found)
    assert (found["result"]["description"], found["result"]["config"]["cooldown_time"]) == ("changed", 60)
    assert job["result"]["baseModel"] == "tiny" and job["result"]["customArgs"] == ["--max-model-len=256"]
    assert "error" not in gone and "404" in missing["error"]
    assert "hf_secret" not in str([made, found, job])


def test_deployments_in_other_forms(package):
    """A config as a dictionary, one for classification, one that is refused; logs there are none of."""
    old = "{'base_model': 'tiny', '.custom_args': {'--seed': '7'}, 'scale_up_threshold': 4}"
    by_dict, sorts, refused, logs, best = package.ask(
        f"pb.deployments.create('by-dict', config={old})",
        "pb.deployments.create('sorts', config=ClassificationDeploymentConfig(base_model='tiny')) "
        "and client('sorts').classify('A')",
        "pb.deployments.create('refused', config=DeploymentConfig(base_model='tiny', backend='v2'))",
        "pb.deployments.download_request_logs('tiny', dest='/nowhere/logs.zip')",
        "pb.deployments.get_recommended_config('tiny')",
    )
    result = by_dict["result"]["config"]
    assert (result["custom_args"], result["scale_up_threshold"]) == (["--seed=7"], 4)
    assert sorts["result"]["data"][0]["label"] == "loud"
    assert "backend" in refused["error"]
    assert "no log" in logs["error"] and best["result"]["baseModel"] == "tiny"
