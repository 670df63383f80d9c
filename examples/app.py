"""Functions that the README and its tests run through `--model function:examples/app.py:NAME`."""

import asyncio

POSITIVE = frozenset({"good", "great", "love", "excellent", "happy", "fine", "fast", "friendly"})
NEGATIVE = frozenset({"bad", "poor", "hate", "awful", "sad", "broken", "slow", "rude"})


def classify(text: str) -> str:
    """Say whether a text is positive, negative or neither, by counting words."""
    words = [word.strip(".,!?;:").lower() for word in text.split()]
    balance = sum(word in POSITIVE for word in words) - sum(word in NEGATIVE for word in words)
    return "positive" if balance > 0 else "negative" if balance < 0 else "neutral"


async def classify_later(text: str) -> dict[str, str | int]:
    """The same from an async function: many rows wait at once, and the result may be any JSON."""
    await asyncio.sleep(0)  # where a real one would call a service
    return {"label": classify(text), "characters": len(text)}


class Classifier:
    """The same from a class: `setup` runs once in each worker, `predict` once for each row."""

    def setup(self) -> None:
        """Load what every row needs."""
        self.labels = {1: "positive", 0: "neutral", -1: "negative"}

    def predict(self, text: str) -> str:
        """Classify one text."""
        words = {word.strip(".,!?;:").lower() for word in text.split()}
        balance = len(words & POSITIVE) - len(words & NEGATIVE)
        return self.labels[(balance > 0) - (balance < 0)]
