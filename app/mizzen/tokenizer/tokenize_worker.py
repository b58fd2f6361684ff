"""The tokenizer process: requests leave in the order they came, so an abort can never overtake its request.

For each request the engine gets its GenerateRequests before the api gets RequestAccepted: "accepted" then means that
the engine has the request. If this process dies in between, the api still holds a request that was not accepted and
can answer it with a clean 503. (A fast engine's first Delta may overtake RequestAccepted on its
way to the api, and implies it.)
"""

import concurrent.futures
import time
from pathlib import Path

import msgspec
import structlog
import zmq

from mizzen.errors import RequestError, RequestFailed
from mizzen.ipc.channels import Sender, ZmqReceiver, ZmqSender
from mizzen.ipc.messages import (
    AbortRequest,
    ChatPrompt,
    GenerateRequest,
    ModelInfo,
    RequestAccepted,
    RequestRefused,
    Shutdown,
    TextPrompt,
    TokenizeRequest,
    TokenizerInbox,
)
from mizzen.ipc.process import BEAT_INTERVAL_S, Child, child_process
from mizzen.tokenizer.chat_template import load_chat_template
from mizzen.tokenizer.hf import HFTokenizer
from mizzen.tokenizer.tokenize import Tokenize

POLL_S = 0.5
INLINE_CHARACTERS = 50_000  # about 50 ms of encoding: beyond, a thread encodes and this loop goes on beating

log = structlog.get_logger()
Answer = tuple[list[GenerateRequest], RequestAccepted | RequestRefused]


def main() -> None:
    with child_process("mizzen.tokenizer.tokenize_worker") as child:
        child.control.beat("load")
        model = msgspec.json.decode((child.run_dir / "model.json").read_bytes(), type=ModelInfo)
        tokenizer = HFTokenizer.from_folder(Path(model.path))
        template = load_chat_template(tokenizer, child.config.server.chat_template)
        TokenizeWorker(child, Tokenize(tokenizer, template, model.vocab_size)).run()


class TokenizeWorker:
    """The loop. One thread owns all sockets."""

    def __init__(self, child: Child, tokenize: Tokenize) -> None:
        self._control = child.control
        self._tokenize = tokenize
        self._inbox = ZmqReceiver(child.context, child.run_dir, f"tokenizer-{child.index}", TokenizerInbox)
        self._engine: Sender = ZmqSender(child.context, child.run_dir, "engine")
        self._apis: list[Sender] = [
            ZmqSender(child.context, child.run_dir, f"api-{k}") for k in range(child.config.server.api_workers)
        ]
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._handled = 0
        self._stopping = False

    def run(self) -> None:
        """Until Shutdown. One message at a time, so that neither beats nor control wait for a batch."""
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._control.socket, zmq.POLLIN)
        self._control.ready()
        while not self._stopping:
            self._attend_to_control(pending=False)
            poller.poll(int(POLL_S * 1000))
            message = self._inbox.recv(0.0)
            if message is not None:
                self._handle(message)
                self._handled += 1

    def _attend_to_control(self, pending: bool) -> None:
        """PeerDown and Drain ask for nothing here: a request in hand ends at its engine or api, which know."""
        self._control.beat("serve", pending=pending, progress=self._handled)
        if any(isinstance(message, Shutdown) for message in self._control.poll()):
            self._stopping = True

    def _handle(self, message: msgspec.Struct) -> None:
        if isinstance(message, AbortRequest):
            self._engine.send(message)
            return
        assert isinstance(message, TokenizeRequest)
        if not 0 <= message.api < len(self._apis):
            log.error("request of an api that does not exist", api=message.api, request_id=message.request_id)
            return
        if _num_characters(message) <= INLINE_CHARACTERS:
            generate, answer = answer_request(self._tokenize, message)
        else:
            future = self._pool.submit(answer_request, self._tokenize, message)
            while not concurrent.futures.wait([future], BEAT_INTERVAL_S).done:
                self._attend_to_control(pending=True)
                if self._stopping:
                    return  # the process ends without waiting for the thread
            generate, answer = future.result()
        for choice in generate:
            self._engine.send(choice)
        self._apis[message.api].send(answer)


def answer_request(tokenize: Tokenize, request: TokenizeRequest) -> Answer:
    """The request's choices, or its refusal: nothing that a request contains may end the process."""
    started_s = time.monotonic()
    try:
        generate, accepted = tokenize(request)
    except RequestError as error:
        return [], RequestRefused(request.request_id, error.wire(), started_s, time.monotonic())
    except Exception:  # a bug met by one request must not end the others: it is logged and refused
        log.exception("tokenizing failed", request_id=request.request_id)
        failed = RequestFailed("The server failed to tokenize the request")
        return [], RequestRefused(request.request_id, failed.wire(), started_s, time.monotonic())
    ended_s = time.monotonic()
    for choice in generate:
        choice.tokenize_s, choice.tokenized_s = started_s, ended_s
    log.debug("tokenized", request_id=request.request_id, seconds=round(ended_s - started_s, 6))
    return generate, accepted


def _num_characters(request: TokenizeRequest) -> int:
    """Of all texts to encode, roughly: templates add little."""
    count = 0
    for prompt in request.prompts:
        if isinstance(prompt, TextPrompt):
            count += len(prompt.text)
        elif isinstance(prompt, ChatPrompt):
            for message in prompt.messages:
                content = message.get("content")
                parts = content if isinstance(content, list) else [content]
                count += sum(len(str(part)) for part in parts)
    return count


if __name__ == "__main__":
    main()
