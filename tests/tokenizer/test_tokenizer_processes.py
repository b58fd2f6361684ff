"""The two workers as real processes over real sockets, with this test as their supervisor, engine and api."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizer_samples as samples
import zmq

from mizzen.config.config import (
    CacheConfig,
    Config,
    EngineConfig,
    LogConfig,
    ModelConfigSource,
    SchedulerConfig,
    ServerConfig,
    SupervisorConfig,
)
from mizzen.errors import EXIT_CONFIG
from mizzen.ipc.channels import ZmqReceiver, ZmqSender, address, configure
from mizzen.ipc.messages import (
    AbortRequest,
    ApiInbox,
    Beat,
    ChatPrompt,
    ChoiceEnded,
    ChoiceStarted,
    Deltas,
    EngineInbox,
    Fatal,
    GenerateRequest,
    ModelInfo,
    PeerDown,
    Ready,
    RequestAccepted,
    RequestRefused,
    Shutdown,
    StepOutput,
    StopChoice,
    TextPrompt,
    TokenizeRequest,
    ToSupervisor,
)
from mizzen.sampling_params import SamplingParams

WAIT_S = 30.0
TEMPLATE = "{{ messages[0].content }}"


def config() -> Config:
    return Config(
        server=ServerConfig("127.0.0.1", 0, "127.0.0.1", 0, 1, (), (), 1, 1.0, 1, None),
        supervisor=SupervisorConfig(*[1.0] * 7, max_restarts=1, restart_window_s=1.0, termination_log=None),
        engine=EngineConfig(
            "cpu",
            1,
            1,
            "sdpa",
            1,
            0,
            CacheConfig(16, "radix", "on-demand", 0.5, None),
            SchedulerConfig("fcfs", 1, 1, None),
            ModelConfigSource("model", None, "auto", "auto", ""),
        ),
        log=LogConfig("warning", "json", 1.0),
        tokenizer_workers=1,
        run_dir_parent=None,
    )


class Bench:
    """A run directory with all that one worker talks to. ``name``: the worker's."""

    def __init__(self, run_dir: Path, model: Path, module: str, name: str) -> None:
        self.context: Any = zmq.Context()
        (run_dir / "config.json").write_bytes(msgspec.json.encode(config()))
        info = ModelInfo(str(model), str(model), "m", "LlamaForCausalLM", 512, 512, (2,))
        (run_dir / "model.json").write_bytes(msgspec.json.encode(info))
        self._name = name.encode()
        self._router = self.context.socket(zmq.ROUTER)
        configure(self._router)
        self._router.bind(address(run_dir, "control"))
        self.engine = ZmqReceiver(self.context, run_dir, "engine", EngineInbox)
        self.api = ZmqReceiver(self.context, run_dir, "api-0", ApiInbox)
        self.worker = ZmqSender(self.context, run_dir, name)
        self.control: list[Any] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--run-dir", str(run_dir), "--name", name, "--parent", str(os.getpid())],
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, kind: type, until: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next control message of that kind; those before it stay in ``control``."""
        decode = msgspec.msgpack.Decoder(ToSupervisor).decode
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self._router.poll(100):
                name, data = self._router.recv_multipart()
                assert name == self._name
                message = decode(data)
                self.control.append(message)
                if isinstance(message, kind) and until(message):
                    return message
        raise AssertionError(f"no {kind.__name__} but {self.control}")

    def tell(self, message: msgspec.Struct) -> None:
        self._router.send_multipart([self._name, msgspec.msgpack.encode(message)])

    def from_engine_side(self) -> Any:
        message = self.engine.recv(WAIT_S)
        assert message is not None
        return message

    def from_api_side(self) -> Any:
        message = self.api.recv(WAIT_S)
        assert message is not None
        return message

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=WAIT_S)
        self.context.destroy(linger=0)


Start = Callable[..., Bench]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    benches: list[Bench] = []
    with tempfile.TemporaryDirectory(prefix="mz-") as run_dir:  # short: socket paths hold 107 bytes

        def begin(worker: str, model: Path | None = None) -> Bench:
            if model is None:
                model = samples.write_folder(tmp_path, samples.byte_level(), chat_template=TEMPLATE)
            name = {"tokenize_worker": "tokenizer-0", "detokenize_worker": "detokenizer"}[worker]
            benches.append(Bench(Path(run_dir), model, f"mizzen.tokenizer.{worker}", name))
            return benches[-1]

        yield begin
        for bench in benches:
            bench.close()


def request(request_id: str, text: str, *, chat: bool = False, max_model_len: int = 100, n: int = 1) -> TokenizeRequest:
    prompt = ChatPrompt([{"role": "user", "content": text}]) if chat else TextPrompt(text)
    return TokenizeRequest(request_id, 0, 1, [prompt], SamplingParams(n=n), max_model_len, arrival_s=1.0)


def test_the_tokenizer_hands_choices_to_the_engine_and_acceptance_to_the_api(start: Start) -> None:
    bench = start("tokenize_worker")
    bench.wait_for(Ready)
    assert bench.control[0] == Beat("load")
    bench.worker.send(request("chat", "hello", chat=True, n=2))
    bench.worker.send(AbortRequest("chat"))
    bench.worker.send(request("long", "z " * 200))
    bench.worker.send(request("text", "again"))
    first, second, abort, text = (bench.from_engine_side() for _ in range(4))
    assert [(c.request_id, c.index) for c in (first, second, text)] == [("chat", 0), ("chat", 1), ("text", 0)]
    assert isinstance(text, GenerateRequest)
    assert abort == AbortRequest("chat")
    tokens = len(first.token_ids) // 4
    accepted, refused, other = (bench.from_api_side() for _ in range(3))
    assert accepted == RequestAccepted("chat", [tokens])
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.error.status, refused.error.code) == ("long", 400, "context_length_exceeded")
    assert isinstance(other, RequestAccepted)
    bench.wait_for(Beat, lambda beat: beat.phase == "serve" and beat.progress == 4)
    bench.tell(Shutdown())
    assert bench.process.wait(WAIT_S) == 0


def test_the_tokenizer_beats_and_obeys_while_it_encodes_a_long_text(start: Start) -> None:
    bench = start("tokenize_worker")
    bench.wait_for(Ready)
    bench.worker.send(request("big", "the quick brown fox " * 400_000, max_model_len=10**7))
    bench.worker.send(AbortRequest("big"))
    bench.wait_for(Beat, lambda beat: beat.pending)
    bench.tell(Shutdown())
    assert bench.process.wait(WAIT_S) == 0
    assert bench.engine.drain() == []  # it ended in the middle, and did not wait


def test_a_long_text_keeps_its_place_before_its_abort(start: Start) -> None:
    bench = start("tokenize_worker")
    bench.wait_for(Ready)
    bench.worker.send(request("big", "the quick brown fox " * 10_000, max_model_len=10**6))
    bench.worker.send(AbortRequest("big"))
    assert isinstance(bench.from_engine_side(), GenerateRequest)
    assert bench.from_engine_side() == AbortRequest("big")


@pytest.mark.parametrize("worker", ["tokenize_worker", "detokenize_worker"])
def test_a_model_without_tokenizer_is_a_configuration_error_of_one_line(
    start: Start, tmp_path: Path, worker: str
) -> None:
    bench = start(worker, model=tmp_path / "nothing")
    fatal = bench.wait_for(Fatal)
    assert fatal.exit_code == EXIT_CONFIG
    assert fatal.message.startswith("MIZZEN_MODEL: ")
    assert bench.process.wait(WAIT_S) == EXIT_CONFIG
    assert "Traceback" not in bench.process.stderr.read()  # type: ignore[union-attr]


def test_the_detokenizer_streams_text_stops_choices_and_finishes_them(start: Start) -> None:
    bench = start("detokenize_worker")
    bench.wait_for(Ready)
    ids = samples.byte_level().encode("The quick brown fox jumps").ids
    started = [ChoiceStarted(7, "r", 0, 0, prompt_tokens=3, stop=("brown",))]
    bench.worker.send(StepOutput(1, reset=True))
    bench.worker.send(StepOutput(1, started=started))
    for token in ids:
        bench.worker.send(
            StepOutput(1, handles=np.array([7]).tobytes(), token_ids=np.array([token], np.int32).tobytes())
        )
    assert bench.from_engine_side() == StopChoice(7)
    bench.worker.send(StepOutput(1, ended=[ChoiceEnded(7, "stop", len(ids))]))
    items = []
    while not (items and items[-1].finish):
        message = bench.from_api_side()
        assert isinstance(message, Deltas)
        items += message.items
    assert "".join(delta.text for delta in items) == "The quick "
    assert items[-1].finish.stop_reason == "brown"
    bench.tell(Shutdown())
    assert bench.process.wait(WAIT_S) == 0


def test_the_detokenizer_forgets_a_dead_api(start: Start) -> None:
    bench = start("detokenize_worker")
    bench.wait_for(Ready)
    bench.worker.send(StepOutput(1, reset=True, started=[ChoiceStarted(7, "r", 0, 0, prompt_tokens=3)]))
    bench.wait_for(Beat, lambda beat: beat.progress == 1)
    bench.tell(PeerDown("api-0"))
    step = StepOutput(1, handles=np.array([7]).tobytes(), token_ids=np.array([2], np.int32).tobytes())  # no text
    deadline = time.monotonic() + WAIT_S
    while (stop := bench.engine.recv(0.1)) is None and time.monotonic() < deadline:
        bench.worker.send(step)
    assert stop == StopChoice(7)
    assert bench.api.drain() == []
