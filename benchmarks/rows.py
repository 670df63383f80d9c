"""The input files of the benchmarks: OpenAI batch rows drawn from a seed, the same bytes every time."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import harness

WRITE_ROWS = 10_000  # lines joined before one write


def write_lines(path: Path, lines: Iterator[bytes]) -> None:
    """Write lines in large pieces."""
    with path.open("wb") as file:
        piece: list[bytes] = []
        for line in lines:
            piece.append(line)
            if len(piece) == WRITE_ROWS:
                file.write(b"".join(piece))
                piece.clear()
        file.write(b"".join(piece))


def chat_rows(rows: int, row_bytes: int) -> Path:
    """Chat rows of exactly `row_bytes` bytes, the line end included; nothing in them is shared or repeated."""
    head = b'{"custom_id":"row-%08d","method":"POST","url":"/v1/chat/completions","body":{"model":"",'
    head += b'"user":"row-%08d","messages":[{"role":"user","content":"%b"}],"max_tokens":16}}\n'

    def lines() -> Iterator[bytes]:
        rng = random.Random(600)
        text_bytes = row_bytes - len(head % (0, 0, b""))
        for number in range(rows):
            text = rng.randbytes((text_bytes + 1) // 2).hex()[:text_bytes]
            yield head % (number, number, text.encode())

    return harness.made_input(f"chat-{rows}x{row_bytes}.jsonl", lambda path: write_lines(path, lines()))


def short_rows(rows: int, row_bytes: int) -> Path:
    """Rows as short as they come, of exactly `row_bytes` bytes with the line end."""
    head = b'{"custom_id":"%08d","method":"POST","url":"/v1/embeddings","body":{"input":"%b"}}\n'

    def lines() -> Iterator[bytes]:
        rng = random.Random(100)
        text_bytes = row_bytes - len(head % (0, b""))
        for number in range(rows):
            text = rng.randbytes((text_bytes + 1) // 2).hex()[:text_bytes]
            yield head % (number, text.encode())

    return harness.made_input(f"short-{rows}x{row_bytes}.jsonl", lambda path: write_lines(path, lines()))


def draw_text(rng: random.Random, characters: int) -> str:
    """Lower-case words of random letters; one character is one token of `examples/tiny-llm`."""
    text = ""
    while len(text) < characters:
        text += "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) + " "
    return text[:characters]


def llm_line(number: int, messages: list[dict[str, str]], tokens_out: int) -> bytes:
    """A chat row whose answer has exactly `tokens_out` tokens, whatever the model would say."""
    body = {
        "model": "",
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens_out,
        "min_tokens": tokens_out,
        "ignore_eos": True,
    }
    row = {"custom_id": f"row-{number:04}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def llm_plain_rows(rows: int, tokens_in: int, tokens_out: int) -> Path:
    """Chat rows with nothing shared."""
    around = 5  # tokens of the chat template: bos, user, end, assistant, and one to spare

    def lines() -> Iterator[bytes]:
        rng = random.Random(300)
        for number in range(rows):
            text = draw_text(rng, tokens_in - around)
            yield llm_line(number, [{"role": "user", "content": text}], tokens_out)

    name = f"llm-plain-{rows}x{tokens_in}-{tokens_out}.jsonl"
    return harness.made_input(name, lambda path: write_lines(path, lines()))


def llm_prefix_rows(rows: int, *, prompts: int, prompt_tokens: int, tokens_out: int) -> Path:
    """Chat rows over a few long system prompts, in shuffled order."""

    def lines() -> Iterator[bytes]:
        rng = random.Random(1400)
        systems = [draw_text(rng, prompt_tokens) for _ in range(prompts)]
        chosen = [systems[number % prompts] for number in range(rows)]
        rng.shuffle(chosen)
        for number, system in enumerate(chosen):
            user = draw_text(rng, 24)
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            yield llm_line(number, messages, tokens_out)

    name = f"llm-prefix-{rows}x{prompts}x{prompt_tokens}-{tokens_out}.jsonl"
    return harness.made_input(name, lambda path: write_lines(path, lines()))
