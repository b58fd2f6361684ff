"""Where a model comes from that is no folder or file here: Hugging Face's hub, or ModelScope's.

Both are asked through their own clients, in a thread, with progress that moves only when bytes do: a stall is seen.
"""

import importlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from mizzen.config.config import ModelSource

Progress = Callable[[float, str], None]  # (fraction done, what is being done): also the heartbeat
Moved = Callable[[float], None]  # the fraction of the bytes that are here

FILES = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHTS = ["*.safetensors"]
IGNORED = ["consolidated*", "original/*"]  # second copies of the weights, in other formats
SOURCES: dict[ModelSource, str] = {
    "huggingface": "mizzen.hub.huggingface",
    "modelscope": "mizzen.hub.modelscope",
}


def download(source: ModelSource, model: str, revision: str | None, *, weights: bool, progress: Progress) -> Path:
    """The local folder of ``model``. Raises ConfigError in one line if it cannot be had."""
    hub = importlib.import_module(SOURCES[source])  # a client takes long to import
    outcome: queue.SimpleQueue[Path | BaseException] = queue.SimpleQueue()
    moved: queue.SimpleQueue[float] = queue.SimpleQueue()
    patterns = [*FILES, *(WEIGHTS if weights else [])]

    def work() -> None:
        try:
            outcome.put(Path(hub.snapshot(model, revision, patterns, moved.put)))
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            outcome.put(error)

    progress(0.0, f"looking up {model}")
    # The caller's progress belongs to its thread, and the clients report from several.
    thread = threading.Thread(target=work, name="download", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        fractions = [moved.get() for _ in range(moved.qsize())]
        if fractions:
            progress(max(fractions), f"downloading {model}")
    result = outcome.get()
    if isinstance(result, BaseException):
        raise hub.explain(result, model, revision) from result
    return result


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
