"""A request as the engine hands it over, and what the scheduler remembers of it until its one ChoiceEnded."""

import hashlib
from dataclasses import dataclass, field

from mizzen.ipc.messages import Timings
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import Int32


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One choice. ``sampling.max_tokens`` is set; ``prompt`` [tokens] is not empty; ``seed`` is resolved."""

    handle: int
    request_id: str
    index: int
    api: int
    prompt: Int32
    sampling: SamplingParams
    seed: int
    arrival_s: float
    tokenize_s: float | None = None  # for Timings alone, as is the next
    tokenized_s: float | None = None
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """An unended request: waiting (``slot`` None), running, or preempted with results still in flight."""

    request: Request
    max_len: int  # tokens, prompt included
    key: tuple[int, ...]  # place in policy order, lowest first; ends in the request's number, so no two are equal
    timings: Timings
    tokens: Int32  # all known tokens, while waiting
    slot: int | None = None
    running: bool = False
    preempted: bool = False
    cached_tokens: int | None = None  # prefix hit at the first admission
    salt: bytes = field(init=False)

    def __post_init__(self) -> None:
        salt = self.request.cache_salt
        # Hashed: it comes from the client and may be long, and it is part of a key at each lookup.
        self.salt = b"" if salt is None else hashlib.sha256(salt.encode()).digest()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)
