"""The detokenizer process: whatever has arrived is handled together, so a slow moment makes deltas larger, not late."""

from pathlib import Path

import msgspec
import zmq

from mizzen.ipc.channels import Sender, ZmqReceiver, ZmqSender
from mizzen.ipc.messages import Deltas, DetokenizerInbox, ModelInfo, PeerDown, Shutdown, StepOutput
from mizzen.ipc.process import Child, child_process
from mizzen.tokenizer.detokenizer import Detokenizer
from mizzen.tokenizer.hf import HFTokenizer

POLL_S = 0.5
_API = "api-"


def main() -> None:
    with child_process("mizzen.tokenizer.detokenize_worker") as child:
        child.control.beat("load")
        model = msgspec.json.decode((child.run_dir / "model.json").read_bytes(), type=ModelInfo)
        tokenizer = HFTokenizer.from_folder(Path(model.path))
        DetokenizeWorker(child, Detokenizer(tokenizer, model.eos_token_ids)).run()


class DetokenizeWorker:
    """The loop. One thread owns all sockets."""

    def __init__(self, child: Child, detokenizer: Detokenizer) -> None:
        self._control = child.control
        self._detokenizer = detokenizer
        self._inbox = ZmqReceiver(child.context, child.run_dir, "detokenizer", DetokenizerInbox)
        self._engine: Sender = ZmqSender(child.context, child.run_dir, "engine")
        self._apis: list[Sender] = [
            ZmqSender(child.context, child.run_dir, f"{_API}{k}") for k in range(child.config.server.api_workers)
        ]

    def run(self) -> None:
        """Until Shutdown."""
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._control.socket, zmq.POLLIN)
        self._control.ready()
        handled = 0
        while True:
            self._control.beat("serve", progress=handled)
            poller.poll(int(POLL_S * 1000))
            for message in self._control.poll():
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, PeerDown) and message.name.startswith(_API):
                    self._detokenizer.drop_api(int(message.name.removeprefix(_API)))
            handled += self._handle(self._inbox.drain())

    def _handle(self, messages: list[msgspec.Struct]) -> int:
        """Stops first: the engine's time is the dearest."""
        outputs = [message for message in messages if isinstance(message, StepOutput)]
        deltas, stops = self._detokenizer.handle(*outputs)
        for stop in stops:
            self._engine.send(stop)
        for api, items in deltas.items():
            self._apis[api].send(Deltas(items))
        return len(outputs)


if __name__ == "__main__":
    main()
