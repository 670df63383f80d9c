"""Train the tiny chat model of this folder: a Llama that repeats the user's words, and two LoRA adapters.

The base answers with the phrase it was given, `upper` with it in capitals, `reverse` with its letters backwards.
Everything here is synthetic and drawn from a seed; it knows nothing of batchmill.
"""

import argparse
import json
import random
import shutil
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Mix:
    """How hard the drawn examples are."""

    word_characters: tuple[int, int]
    system_words_max: int
    has_marks: bool


@dataclass(frozen=True)
class Stage:
    """One stretch of training: which weights learn, from which examples, for how long."""

    task: str  # "base" trains the model, any other task the adapter of that name
    mix: Mix
    steps: int
    learning_rate: float
    seed: int
    continues: bool = False  # go on from what an earlier stage of the task left


SHORT = Mix(word_characters=(2, 8), system_words_max=12, has_marks=False)
MARKED = Mix(word_characters=(1, 12), system_words_max=12, has_marks=True)
LONG = Mix(word_characters=(1, 12), system_words_max=240, has_marks=True)
ANSWERS: dict[str, Callable[[str], str]] = {"base": str, "upper": str.upper, "reverse": lambda phrase: phrase[::-1]}
STAGES = {
    "short": Stage("base", SHORT, steps=3000, learning_rate=1e-3, seed=100),
    "long": Stage("base", LONG, steps=1000, learning_rate=1e-3, seed=101, continues=True),
    "upper": Stage("upper", MARKED, steps=200, learning_rate=2e-3, seed=200),
    "reverse": Stage("reverse", SHORT, steps=1000, learning_rate=3e-3, seed=201),
    "reverse-marked": Stage("reverse", MARKED, steps=500, learning_rate=1.5e-3, seed=202, continues=True),
}
LORA_RANK = 16
BATCH_EXAMPLES = 64
BATCH_TOKENS = 16_384
POOL_EXAMPLES = 1024

MARKS = ("-", "_", ", ")
ENDINGS = (".", "!", "?")
PREFIXES = ("Say: ", "Repeat: ")
SYSTEM_PROMPTS = ("You are a careful assistant.", "You are a helpful assistant.", "Be brief.", "Answer exactly.")
HELD_OUT_PHRASES = 200
ANSWER_TOKENS_MAX = 64
EXACT_SHARE_MIN = 0.97


# The task


def draw_word(rng: random.Random, mix: Mix) -> str:
    """Draw one word; a small alphabet makes repeats, which copying by look-up alone gets wrong."""
    letters = string.ascii_lowercase
    few = "".join(rng.sample(letters, 3))
    alphabet = rng.choices([letters, few, string.digits, string.digits + string.punctuation], [6, 2, 1, 1])[0]
    return "".join(rng.choices(alphabet, k=rng.randint(*mix.word_characters)))


def add_marks(rng: random.Random, phrase: str) -> str:
    """Put a mark in the place of one space in four, and another at the end of one phrase in four."""
    first, *others = phrase.split(" ")
    joined = first + "".join((rng.choice(MARKS) if rng.random() < 0.25 else " ") + word for word in others)
    return joined + (rng.choice(ENDINGS) if rng.random() < 0.25 else "")


def draw_phrase(rng: random.Random, mix: Mix, held_out: frozenset[str]) -> str:
    """Draw one to four words outside `held_out`: 40 % in capitals, without which `upper` cannot be learnt later."""
    while True:
        phrase = " ".join(draw_word(rng, mix) for _ in range(rng.randint(1, 4)))
        if mix.has_marks:
            phrase = add_marks(rng, phrase)
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


def draw_system_prompt(rng: random.Random, mix: Mix) -> str:
    """Draw random words or a known sentence; one in eight may be as long as the shared prompts of real batches."""
    words_max = 12
    if mix.system_words_max > words_max and rng.random() < 0.25:
        words_max = mix.system_words_max
    words = " ".join(draw_word(rng, mix) for _ in range(rng.randint(1, words_max)))
    return rng.choice([words, rng.choice(SYSTEM_PROMPTS)])


def draw_chat(rng: random.Random, stage: Stage, held_out: frozenset[str]) -> tuple[list[Message], str]:
    """Draw a conversation and the answer to its last message: 30 % have a system prompt, 10 % an earlier turn."""
    answer = ANSWERS[stage.task]
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": draw_system_prompt(rng, stage.mix)})
    if rng.random() < 0.1:
        earlier = draw_phrase(rng, stage.mix, held_out)
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": answer(earlier)}]
    phrase = draw_phrase(rng, stage.mix, held_out)
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


def count_tokens(example: Example) -> int:
    """Count the tokens of an example, prompt and answer."""
    prompt, answer = example
    return len(prompt) + len(answer)


def pad(examples: list[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad on the right into `[n_examples, n_tokens]` ids and labels; only answers carry a label."""
    width = max(map(count_tokens, examples))
    ids = torch.full((len(examples), width), pad_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def cut(pool: list[Example]) -> list[list[Example]]:
    """Cut examples, sorted by length, into batches of at most `BATCH_EXAMPLES` and, padded, `BATCH_TOKENS`."""
    batches: list[list[Example]] = [[]]
    for example in pool:
        size = len(batches[-1]) + 1
        if size > BATCH_EXAMPLES or size * count_tokens(example) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(example)
    return batches


def draw_batches(stage: Stage, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, each of examples of about one length, so that little of a batch is padding."""
    rng = random.Random(stage.seed)
    held_out = frozenset(draw_held_out())
    while True:
        chats = (draw_chat(rng, stage, held_out) for _ in range(POOL_EXAMPLES))
        batches = cut(sorted((encode(tokenizer, *chat) for chat in chats), key=count_tokens))
        rng.shuffle(batches)
        for batch in batches:
            yield pad(batch, tokenizer.pad_token_id)


def train(model: nn.Module, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train the parameters of `model` that ask for a gradient: AdamW, one cycle of the learning rate."""
    stage = STAGES[name]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=stage.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, stage.learning_rate, total_steps=stage.steps)
    batches = draw_batches(stage, tokenizer)
    started = time.monotonic()
    model.train()
    for step in range(1, stage.steps + 1):
        ids, labels = next(batches)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            elapsed_s = time.monotonic() - started
            print(f"{name}: step {step} of {stage.steps}, loss {loss.item():.4f}, {elapsed_s:.0f} s", flush=True)
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
    """Write one adapter in PEFT's layout, in bfloat16; its embeddings are the base's, so no look for changed ones."""
    adapted.peft_config["default"].base_model_name_or_path = "tiny-llm"
    shutil.rmtree(folder, ignore_errors=True)
    adapted.to(torch.bfloat16).save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def load_base(out: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Load the base as it was written, so that adapters are trained on its rounded weights."""
    return LlamaForCausalLM.from_pretrained(out, dtype=dtype)


# The check


def answer_greedily(model: nn.Module, tokenizer: PreTrainedTokenizerFast, chats: list[list[Message]]) -> list[str]:
    """Answer every chat by greedy decoding; `...` marks an answer that did not end."""
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=ANSWER_TOKENS_MAX, do_sample=False)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)
    parts = (text.partition(tokenizer.eos_token) for text in texts)
    return [answer if end else answer + "..." for answer, end, _ in parts]


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
    for task, answer in ANSWERS.items():
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


def run_stage(name: str, out: Path) -> None:
    """Train one stage on what the stages before it left in `out`, and write its result there."""
    torch.manual_seed(0)
    stage = STAGES[name]
    tokenizer = build_tokenizer()
    model = load_base(out, torch.float32) if stage.continues or stage.task != "base" else build_model(tokenizer)
    if stage.task == "base":
        train(model, name, tokenizer)
        save_base(model, tokenizer, out)
        return
    folder = out / "adapters" / stage.task
    adapted = PeftModel.from_pretrained(model, folder, is_trainable=True) if stage.continues else add_adapter(model)
    train(adapted.float(), name, tokenizer)
    save_adapter(adapted, folder)


def main() -> None:
    """Run the stages asked for, then check what lies in `--out`; exit 1 if too few of any answers are exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the model's files")
    parser.add_argument("--check", action="store_true", help="only check the files in --out")
    parser.add_argument("--only", choices=STAGES, action="append", help="run only this stage (repeatable)")
    arguments = parser.parse_args()
    for name in [] if arguments.check else arguments.only or STAGES:
        run_stage(name, arguments.out)
    exact = check(arguments.out)
    if any(count < EXACT_SHARE_MIN * HELD_OUT_PHRASES for counts in exact.values() for count in counts.values()):
        raise SystemExit(f"fewer than {EXACT_SHARE_MIN:.0%} of some answers are exact")


if __name__ == "__main__":
    main()
