"""What is read of an adapter, and why it is refused."""

import json
from pathlib import Path

import pytest
from fakes.lora_files import CONFIG, MODULE, WEIGHTS, config, lora, lora_files, safetensors, write_base, write_lora

from batchmill.errors import InvalidInput
from batchmill.models.adapters.reading import AdapterFacts, engine_rank_for, find_mismatch, rank_of, read_adapter

EXAMPLES = Path(__file__).parents[3] / "examples" / "tiny-llm"


def test_an_adapter_of_the_examples() -> None:
    """A real adapter says its rank, its base, its modules and their sizes, and fits the model it was trained for."""
    facts = read_adapter(EXAMPLES / "adapters" / "upper")
    assert (facts.rank, facts.base) == (16, "tiny-llm")
    assert facts.bytes == sum(path.stat().st_size for path in (EXAMPLES / "adapters" / "upper").iterdir())
    assert "q_proj" in facts.target_modules
    assert facts.modules["model.layers.3.mlp.down_proj"] == (344, 128)
    assert find_mismatch(facts, base_source=str(EXAMPLES), rank_max=16) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "it is a DoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"lora_bias": True}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: lm_head"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"layer_replication": [[0, 1]]}, "repeats layers"),
        ({"use_bdlora": {"a": 1}}, "block-diagonal"),
        ({"use_qalora": True}, "QALoRA"),
        ({"lora_alpha": None}, "lora_alpha is not a number"),
        ({"target_modules": None}, "has no modules"),
        ({"r": 0}, "its rank is 0"),
        ({"r": "16"}, "its rank is '16'"),
        ({"r": 513}, "its rank is 513, and vLLM serves at most 512"),
        ({"rank_pattern": {"q_proj": -1}}, "its rank is -1"),
        ({"rank_pattern": {"q_proj": 1024}}, "its rank is 1024"),
    ],
)
def test_what_is_not_served(tmp_path: Path, changes: dict, words: str) -> None:
    """An adapter that vLLM would refuse, or serve wrongly, is refused by the field that says so."""
    write_lora(tmp_path / "a", {CONFIG: json.dumps(config(**changes)).encode(), WEIGHTS: lora()})
    with pytest.raises(InvalidInput) as caught:
        read_adapter(tmp_path / "a")
    assert caught.value.code == "invalid_adapter"
    assert words in caught.value.message and caught.value.message.startswith("this adapter cannot be served")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "it has no adapter_config.json"),
        ({CONFIG: b"{"}, "adapter_config.json cannot be read"),
        ({CONFIG: b"[]"}, "adapter_config.json cannot be read"),
        ({CONFIG: b" " * (1024 * 1024 + 1)}, "adapter_config.json is larger than"),
        ({CONFIG: lora_files()[CONFIG]}, "it has no adapter_model.safetensors"),
        ({CONFIG: lora_files()[CONFIG], "adapter_model.bin": b"x"}, "adapter_model.bin, a pickle"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: b""}, "its header is longer than the file"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: b"\xff" * 64}, "its header is longer than the file"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: lora()[:-1]}, "it is incomplete"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: lora() + b"x"}, "it is incomplete"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: (2).to_bytes(8, "little") + b"{}"}, "has no tensors"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: (2).to_bytes(8, "little") + b"{]"}, "its header cannot be read"),
        ({CONFIG: lora_files()[CONFIG], WEIGHTS: lora(rank=8)}, "has rank 8 and 8; adapter_config.json says 4"),
        (
            {CONFIG: lora_files()[CONFIG], WEIGHTS: safetensors({f"{MODULE}.lora_A.weight": [4, 16]})},
            "has only lora_A",
        ),
        (
            {CONFIG: lora_files()[CONFIG], WEIGHTS: safetensors({"model.embed_tokens.weight": [4, 16]})},
            "does not belong to a LoRA",
        ),
        (
            {CONFIG: lora_files()[CONFIG], WEIGHTS: safetensors({f"{MODULE}.lora_magnitude_vector": [4]})},
            "those of a DoRA",
        ),
    ],
)
def test_what_is_no_adapter(tmp_path: Path, files: dict, words: str) -> None:
    """Missing, broken and lying files are refused with what is wrong with them; none is loaded to find out."""
    folder = tmp_path / "a"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with pytest.raises(InvalidInput) as caught:
        read_adapter(folder)
    assert words in caught.value.message


def test_a_shape_that_is_not_its_bytes(tmp_path: Path) -> None:
    """A head that claims other bytes than its shapes take is refused."""
    data = lora().replace(b'"shape": [4, 16]', b'"shape": [4, 17]')
    write_lora(tmp_path / "a", lora_files() | {WEIGHTS: data})
    with pytest.raises(InvalidInput, match="do not match its shape"):
        read_adapter(tmp_path / "a")


def test_the_rank_counts_patterns(tmp_path: Path) -> None:
    """The rank is that of the largest module."""
    write_lora(tmp_path / "a", rank_pattern={"q_proj": 32})
    assert rank_of(tmp_path / "a") == read_adapter(tmp_path / "a").rank == 32


@pytest.mark.parametrize(
    ("ranks", "room"), [([], 0), ([1], 1), ([2, 8], 8), ([9], 16), ([16, 33], 64), ([257], 320), ([512], 512)]
)
def test_room(ranks: list[int], room: int) -> None:
    """The room is the least that vLLM has and that holds every rank."""
    assert engine_rank_for(ranks) == room


def test_no_room() -> None:
    """Beyond what vLLM has there is none."""
    with pytest.raises(InvalidInput, match="rank 513"):
        engine_rank_for([8, 513])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lora(), ""),
        (lora(takes=8), "its model.layers.0.self_attn.q_proj takes 8 and gives 16, and this model's takes 16"),
        (lora(module=MODULE.replace("layers.0", "layers.2")), "it is for layer 2, and this model has layers 0 to 1"),
        (lora(module=MODULE.replace("q_proj", "qkv_proj")), "this model has no model.layers.0.self_attn.qkv_proj"),
        (lora(module="base_model.model.other.blocks.0.attn"), ""),  # named in a way of its own: nothing can be said
    ],
)
def test_a_base_in_a_folder(tmp_path: Path, weights: bytes, words: str) -> None:
    """The base's own files decide, whatever the adapter calls it."""
    base = write_base(tmp_path / "base")
    facts = read_adapter(write_lora(tmp_path / "a", lora_files(base_model_name_or_path="x/other") | {WEIGHTS: weights}))
    found = find_mismatch(facts, base_source=str(base), rank_max=0)
    assert found.startswith(words) if words else found == ""
    assert not words or found.endswith(": it was trained for x/other")


def test_a_base_in_several_files(tmp_path: Path) -> None:
    """A base whose weights are cut into files is read as one is."""
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").rename(base / "model-00001-of-00002.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    index = {"weight_map": {name: "model-00001-of-00002.safetensors", "x": "../outside.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = read_adapter(write_lora(tmp_path / "a", lora_files() | {WEIGHTS: lora(takes=8)}))
    assert "takes 8 and gives 16" in find_mismatch(facts, base_source=str(base), rank_max=0)


@pytest.mark.parametrize(
    ("trained", "base", "fits"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", True),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B", True),
        ("Qwen/Qwen2.5-7B", "qwen/qwen2.5-7b-AWQ", True),
        ("mistralai/Mistral-7B-v0.1", "meta-llama/Llama-3.1-8B", False),
        ("/home/me/llama", "meta-llama/Llama-3.1-8B", True),
        (None, "meta-llama/Llama-3.1-8B", True),
    ],
)
def test_a_base_of_a_hub(trained: str | None, base: str, fits: bool) -> None:
    """Where only names are known another model's is refused; an organisation, case or number format is not another."""
    found = find_mismatch(AdapterFacts(8, trained, 1, ["q_proj"]), base_source=base, rank_max=8)
    assert (found == "") is fits
    assert fits or (str(trained) in found and base in found)


def test_a_rank_too_high() -> None:
    """An adapter whose rank the engine has no room for does not fit."""
    facts = AdapterFacts(32, None, 1, ["q_proj"])
    result = find_mismatch(facts, base_source="org/model", rank_max=16)
    assert result == "its rank is 32, and the maximum of this model's engine is 16"
    assert find_mismatch(facts, base_source="org/model", rank_max=32) == ""
