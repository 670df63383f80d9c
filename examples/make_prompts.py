"""Write `prompts.jsonl`: 60 chat rows for the base model of `tiny-llm` and its adapters `upper` and `reverse`.

The model repeats the user's words; `upper` answers in capitals, `reverse` with the letters of the phrase backwards.
"""

import json
import random
import string
from pathlib import Path

ROWS_PER_MODEL = 20
MODELS = ("tiny-llm", "upper", "reverse")


def draw_phrase(rng: random.Random) -> str:
    """Draw one to four words of two to eight lower-case letters."""
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4)))


def main() -> None:
    """Write the rows beside this script, the models in turn."""
    rng = random.Random(20)
    path = Path(__file__).with_name("prompts.jsonl")
    with path.open("w") as file:
        for number in range(ROWS_PER_MODEL * len(MODELS)):
            model = MODELS[number % len(MODELS)]
            # The base model may go without its name: half of its rows leave `model` empty.
            name = "" if model == "tiny-llm" and number % 2 else model
            body = {
                "model": name,
                "messages": [{"role": "user", "content": draw_phrase(rng)}],
                "temperature": 0,
                "max_tokens": 48,
            }
            row = {"custom_id": f"{model}-{number:02}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
