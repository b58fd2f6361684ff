"""The metrics process: adds up what the others send, and answers with the exposition. Nothing depends on it.

``python -m mizzen.observability.metrics_worker``. One that is restarted begins at zero, as Prometheus expects of
counters; requests never wait for it, and readiness does not ask for it.
"""

import queue
import threading

import zmq

from mizzen.ipc.channels import ZmqReceiver, address, configure
from mizzen.ipc.messages import Shutdown
from mizzen.ipc.process import BEAT_INTERVAL_S, Child, child_process
from mizzen.observability.exposition import Merged
from mizzen.observability.feed import METRICS, QUERY, Feed, Samples
from mizzen.observability.gpus import watch_gpus


def run(child: Child) -> None:
    """Until Shutdown."""
    merged = Merged(child.config)
    inbox = ZmqReceiver(child.context, child.run_dir, METRICS, Samples)
    query = child.context.socket(zmq.ROUTER)  # not REP: an asker that gave up must not hold up the next
    configure(query)
    query.bind(address(child.run_dir, QUERY))
    poller = zmq.Poller()
    for socket in (inbox.socket, query, child.control.socket):
        poller.register(socket, zmq.POLLIN)
    of_gpus: queue.SimpleQueue[Samples] = queue.SimpleQueue()
    engine = child.config.engine
    if engine.device == "cuda":

        def put(samples: Samples) -> bool:
            of_gpus.put(samples)
            return True

        threading.Thread(target=watch_gpus, args=(Feed(put), engine.tensor_parallel_size), daemon=True).start()
    child.control.ready()
    messages = 0
    while not any(isinstance(message, Shutdown) for message in child.control.poll()):
        child.control.beat("serve", progress=messages)
        poller.poll(int(BEAT_INTERVAL_S * 1000))
        for samples in inbox.drain():
            assert isinstance(samples, Samples)
            merged.add(samples)
            messages += 1
        while not of_gpus.empty():
            merged.add(of_gpus.get())
        askers = []
        while query.poll(0):
            *route, _ = query.recv_multipart()
            askers.append(route)
        if askers:
            text = merged.exposition()
            for route in askers:
                query.send_multipart([*route, text], zmq.NOBLOCK)


def main() -> None:
    with child_process("mizzen.observability.metrics_worker") as child:
        run(child)


if __name__ == "__main__":
    main()
