"""An engine in the test's own process: the real loop, scheduler, runner and model, over in-process channels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mizzen.config.config import EngineConfig
from mizzen.config.resolve import resolve
from mizzen.config.settings import Settings
from mizzen.distributed.group import SingleGroup
from mizzen.engine.build import build_rank, build_scheduler, make_platform
from mizzen.engine.loop import EngineLoop
from mizzen.ipc.inproc import InprocChannel
from mizzen.ipc.messages import ChoiceEnded, GenerateRequest, ModelInfo, StepOutput
from mizzen.models.config import eos_token_ids, parse_architecture
from mizzen.sampling_params import SamplingParams


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    ended: ChoiceEnded | None = None
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)


def engine_config(folder: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"threads": 1, "device": "cpu", "kv_cache_bytes": 2**24}
    return resolve(Settings(model=str(folder), **{**defaults, **settings})).engine


class EngineUnderTest:
    """Give it requests, run it, read the answers. ``settings`` are Settings' fields."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = engine_config(folder, **settings)
        architecture = parse_architecture(folder)
        model = ModelInfo(
            path=str(folder),
            weights=str(folder),
            name=folder.name,
            architecture=architecture.name,
            vocab_size=architecture.vocab_size,
            context_length=architecture.context_length,
            eos_token_ids=eos_token_ids(folder),
        )
        self.rank = build_rank(config, model, make_platform(config, 0), SingleGroup(), lambda *_: None)
        self.scheduler = build_scheduler(config, self.rank)
        self.inbox, self.outbox = InprocChannel(), InprocChannel()
        self.loop = EngineLoop(
            self.scheduler,
            self.rank.runner,
            self.inbox,
            self.outbox,
            depth=config.overlap_depth,
            epoch=1,
            seed=0,
            annotate=self.rank.annotate,
        )
        self.answers: dict[tuple[str, int], Answer] = {}
        self._keys: dict[int, tuple[str, int]] = {}
        self.outputs = 0

    def submit(self, request_id: str, prompt: list[int], *, index: int = 0, **options: Any) -> None:
        sampling = {"temperature": 0.0, "max_tokens": 16, **options.pop("sampling", {})}
        self.inbox.send(
            GenerateRequest(
                request_id=request_id,
                index=index,
                api=0,
                epoch=1,
                token_ids=np.array(prompt, np.int32).tobytes(),
                sampling=SamplingParams(**sampling),
                arrival_s=0.0,
                **options,
            )
        )

    def step(self) -> None:
        self.loop.step(0.0)
        self._collect()

    def run(self, each_step: Callable[[int], None] = lambda _: None, limit: int = 20_000) -> dict[str, Answer]:
        """Runs until idle; ``each_step`` is called with the turn's number before each turn."""
        for turn in range(limit):
            each_step(turn)
            self.step()
            if not self.loop.has_work():
                break
        else:
            raise AssertionError(f"the engine is not idle after {limit} turns")
        self.scheduler.check()
        load = self.loop.load()
        assert (load.running, load.waiting, load.kv_pages_used) == (0, 0, 0), load
        return {request_id: answer for (request_id, _), answer in self.answers.items()}

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        names = [f"g{len(self.answers) + k}" for k in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.submit(name, prompt, sampling=sampling)
        self.run()
        return [self.answers[name, 0].token_ids for name in names]

    def close(self) -> None:
        self.loop.close()

    def _collect(self) -> None:
        for message in self.outbox.drain():
            message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=StepOutput)  # as it travels
            self.outputs += 1
            for start in message.started:
                self._keys[start.handle] = (start.request_id, start.index)
                self.answers[start.request_id, start.index] = Answer()
            handles = np.frombuffer(message.handles, np.int64).tolist()
            tokens = np.frombuffer(message.token_ids, np.int32).tolist()
            for handle, token in zip(handles, tokens, strict=True):
                answer = self.answers[self._keys[handle]]
                assert answer.ended is None, "a token after the end"
                answer.token_ids.append(token)
            if (top := message.top_logprobs) is not None:
                ids = np.frombuffer(top.token_ids, np.int32).reshape(-1, top.width)
                values = np.frombuffer(top.logprobs, np.float32).reshape(-1, top.width)
                chosen = np.frombuffer(top.chosen, np.float32)
                for k, handle in enumerate(np.frombuffer(top.handles, np.int64).tolist()):
                    answer = self.answers[self._keys[handle]]
                    answer.logprobs.append(float(chosen[k]))
                    answer.tops.append(list(zip(ids[k].tolist(), values[k].tolist(), strict=True)))
            for ended in message.ended:
                answer = self.answers[self._keys[ended.handle]]
                assert answer.ended is None, "two ends"
                answer.ended = ended
                assert ended.completion_tokens == len(answer.token_ids)
