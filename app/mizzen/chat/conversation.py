"""What the model is told: the system prompt, the turns so far and the sampling parameters.

A turn is a question with some answer: one that brought no text is forgotten, so roles always alternate.
"""

import math
from collections.abc import Callable
from typing import Any

PARAMETERS: dict[str, Callable[[str], float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
}


class Conversation:
    def __init__(self) -> None:
        self.system = ""
        self.parameters: dict[str, Any] = {}
        self._turns: list[tuple[str, str]] = []

    def messages(self, question: str) -> list[dict[str, str]]:
        """The body of a request that asks ``question`` next."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self._turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def remember(self, question: str, answer: str) -> None:
        """Keeps a turn. An answer that was cut stays as it came."""
        if answer:
            self._turns.append((question, answer))

    def reset(self) -> None:
        self._turns.clear()

    def set_parameter(self, name: str, text: str) -> None:
        """Sets a parameter, or with "default" leaves it to the server. Raises ValueError; ranges are the server's."""
        if name not in PARAMETERS:
            raise ValueError(f"{name} cannot be set; what can: {', '.join(PARAMETERS)}")
        if text == "default":
            self.parameters.pop(name, None)
            return
        kind = PARAMETERS[name]
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{name} must be {'a whole number' if kind is int else 'a number'}, or default")
        self.parameters[name] = value
