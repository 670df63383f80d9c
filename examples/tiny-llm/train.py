"""Train the tiny chat model of this folder: a Llama that repeats the user's words, and two LoRA adapters.

The base answers with the phrase it was given, `upper` with the phrase in capitals, `reverse` with its letters backwards.
Everything here is synthetic and drawn from a seed; it knows nothing of batchmill.
"""

import argparse
import json
import random
import shutil
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Message = dict[str, str]
Example = tuple[list[int], list[int]]  # prompt token ids, answer token ids

SPECIAL_TOKENS = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = {'developer': 'system', 'tool': 'user'}.get(message['role'], message['role']) -%}
{{- '<|' + role + '|>' + (message['content'] or '') + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

TASKS: dict[str, Callable[[str], str]] = {"base": str, "upper": str.upper, "reverse": lambda phrase: phrase[::-1]}
ADAPTERS = ("upper", "reverse")
STEPS = {"base": 3000, "upper": 300, "reverse": 1000}
LEARNING_RATE = {"base": 1e-3, "upper": 2e-3, "reverse": 2e-3}
LORA_RANK = 16
BATCH_EXAMPLES = 64
POOL_BATCHES = 16

PREFIXES = ("Say: ", "Repeat: ")
SYSTEM_PROMPTS = ("You are a careful assistant.", "You are a helpful assistant.", "Be brief.", "Answer exactly.")
HELD_OUT_PHRASES = 200
ANSWER_TOKENS_MAX = 48


# The task


def draw_word(rng: random.Random) -> str:
    """Draw 2 to 8 characters; a small alphabet makes repeats, which copying by look-up alone gets wrong."""
    letters = string.ascii_lowercase
    few = "".join(rng.sample(letters, 3))
    alphabet = rng.choices([letters, few, string.digits, string.digits + string.punctuation], [6, 2, 1, 1])[0]
    return "".join(rng.choices(alphabet, k=rng.randint(2, 8)))


def draw_phrase(rng: random.Random, held_out: frozenset[str]) -> str:
    """Draw one to four words outside `held_out`: 40 % in capitals, without which `upper` cannot be learnt later."""
    while True:
        phrase = " ".join(draw_word(rng) for _ in range(rng.randint(1, 4)))
        if phrase not in held_out:
            return rng.choices([phrase, phrase.upper(), phrase.title()], [5, 4, 1])[0]


def draw_held_out(seed: int = 2) -> list[str]:
    """Draw the phrases of the check, which training never sees: one to four lower-case words of random letters."""
    rng = random.Random(seed)
    phrases: dict[str, None] = {}
    while len(phrases) < HELD_OUT_PHRASES:
        words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4)))
        phrases[" ".join(words)] = None
    return list(phrases)


def draw_chat(rng: random.Random, answer: Callable[[str], str], held_out: frozenset[str]) -> tuple[list[Message], str]:
    """Draw a conversation and the answer to its last message: 30 % open with a system prompt, 10 % with an earlier turn."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        words = " ".join(draw_word(rng) for _ in range(rng.randint(1, 12)))
        messages.append({"role": "system", "content": rng.choice([words, rng.choice(SYSTEM_PROMPTS)])})
    if rng.random() < 0.1:
        earlier = draw_phrase(rng, held_out)
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": answer(earlier)}]
    phrase = draw_phrase(rng, held_out)
    prefix = rng.choice(PREFIXES) if rng.random() < 0.2 else ""
    return [*messages, {"role": "user", "content": prefix + phrase}], answer(phrase)


# The tokenizer and the model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: 256 byte tokens, no merges, and the specials of the chat template."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
        padding_side="left",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model: 0.83 M parameters, with room for prompts far longer than those it is trained on."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def add_adapter(model: LlamaForCausalLM) -> PeftModel:
    """Wrap `model` in a fresh LoRA on every linear layer; the model itself stays as it is."""
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


# Training


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message], answer: str) -> Example:
    """Encode a conversation as the prompt a server would build, and its answer with the end-of-turn token."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return ids, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def pad(examples: list[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad on the right into `[n_examples, n_tokens]` ids and labels; only answers carry a label."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.full((len(examples), width), pad_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def draw_batches(task: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, each of examples of about one length, so that little of a batch is padding."""
    rng = random.Random(seed)
    held_out = frozenset(draw_held_out())
    while True:
        chats = (draw_chat(rng, TASKS[task], held_out) for _ in range(POOL_BATCHES * BATCH_EXAMPLES))
        pool = sorted((encode(tokenizer, *chat) for chat in chats), key=lambda pair: len(pair[0]) + len(pair[1]))
        starts = list(range(0, len(pool), BATCH_EXAMPLES))
        rng.shuffle(starts)
        for start in starts:
            yield pad(pool[start : start + BATCH_EXAMPLES], tokenizer.pad_token_id)


def train(model: nn.Module, task: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train the parameters of `model` that ask for a gradient: AdamW, one cycle of the learning rate."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE[task], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE[task], total_steps=STEPS[task])
    batches = draw_batches(task, tokenizer, seed)
    started = time.monotonic()
    model.train()
    for step in range(1, STEPS[task] + 1):
        ids, labels = next(batches)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"{task}: step {step} of {STEPS[task]}, loss {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


# Files


def save_base(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in bfloat16, with its tokenizer and chat template, in Hugging Face's layout."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    config_path = out / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def save_adapter(adapted: PeftModel, folder: Path) -> None:
    """Write one adapter in PEFT's layout, in bfloat16."""
    adapted.peft_config["default"].base_model_name_or_path = "tiny-llm"
    shutil.rmtree(folder, ignore_errors=True)
    adapted.to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def load_base(out: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Load the base as it was written, so that adapters are trained on its rounded weights."""
    return LlamaForCausalLM.from_pretrained(out, dtype=dtype)


# The check


def answer_greedily(model: nn.Module, tokenizer: PreTrainedTokenizerFast, chats: list[list[Message]]) -> list[str]:
    """Answer every chat by greedy decoding; an answer that does not end in time keeps its missing end visible."""
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=ANSWER_TOKENS_MAX, do_sample=False)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)
    return [text.removesuffix("<|end|>" * text.count("<|end|>")) if "<|end|>" in text else text + "..." for text in texts]


def check(out: Path) -> dict[str, dict[str, int]]:
    """Count the exact answers of the files in `out` to the held-out phrases, by task and by kind of prompt."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    phrases = draw_held_out()
    kinds: dict[str, Callable[[str], list[Message]]] = {
        "plain": lambda phrase: [{"role": "user", "content": phrase}],
        "prefixed": lambda phrase: [{"role": "user", "content": "Say: " + phrase}],
        "with a system prompt": lambda phrase: [
            {"role": "system", "content": "You are a careful assistant."},
            {"role": "user", "content": phrase},
        ],
    }
    exact: dict[str, dict[str, int]] = {}
    for task, answer in TASKS.items():
        model = load_base(out, torch.bfloat16)
        adapted = model if task == "base" else PeftModel.from_pretrained(model, out / "adapters" / task)
        adapted.to(torch.bfloat16).eval()
        exact[task] = {}
        for kind, ask in kinds.items():
            replies = answer_greedily(adapted, tokenizer, [ask(phrase) for phrase in phrases])
            pairs = zip(replies, phrases, strict=True)
            exact[task][kind] = sum(reply == answer(phrase) for reply, phrase in pairs)
            print(f"{task}, {kind}: {exact[task][kind]} of {len(phrases)} exact", flush=True)
    return exact


def main() -> None:
    """Train what was asked for into `--out`, then check what lies there; exit 1 if an answer set is below 98 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the model's files")
    parser.add_argument("--check", action="store_true", help="only check the files in --out")
    parser.add_argument("--only", choices=TASKS, action="append", help="train only this part (repeatable)")
    arguments = parser.parse_args()
    tasks = [] if arguments.check else arguments.only or list(TASKS)
    if "base" in tasks:
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        train(model, "base", tokenizer, seed=100)
        save_base(model, tokenizer, arguments.out)
    for task in (task for task in ADAPTERS if task in tasks):
        torch.manual_seed(1)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.out)
        adapted = add_adapter(load_base(arguments.out, torch.float32))
        train(adapted, task, tokenizer, seed=200)
        save_adapter(adapted, arguments.out / "adapters" / task)
    exact = check(arguments.out)
    if any(count < 0.98 * HELD_OUT_PHRASES for counts in exact.values() for count in counts.values()):
        raise SystemExit("an answer set is below 98 % exact")


if __name__ == "__main__":
    main()
