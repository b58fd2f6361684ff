"""A model's files from the Hugging Face hub, with progress that moves only when bytes do, so that a stall is seen."""

import errno
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download
from tqdm import tqdm

from mizzen.errors import ConfigError
from mizzen.models.config import Progress

_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_IGNORED = ["consolidated*", "original/*"]  # second copies of the weights, in other formats


def download(model: str, revision: str | None, *, weights: bool, progress: Progress) -> Path:
    """The local folder of Hugging Face model ``model``. Raises ConfigError in one line if it cannot be had."""
    outcome: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    moved: queue.SimpleQueue[float] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put(
                snapshot_download(
                    model,
                    revision=revision,
                    allow_patterns=[*_FILES, *(["*.safetensors"] if weights else [])],
                    ignore_patterns=_IGNORED,
                    tqdm_class=_counter(moved.put),
                )
            )
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            outcome.put(error)

    progress(0.0, f"looking up {model}")
    # The caller's progress belongs to its thread, and the hub reports from several.
    thread = threading.Thread(target=work, name="download", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        fractions = [moved.get() for _ in range(moved.qsize())]
        if fractions:
            progress(max(fractions), f"downloading {model}")
    result = outcome.get()
    if isinstance(result, BaseException):
        raise _explain(result, model, revision) from result
    return Path(result)


def _counter(moved: Callable[[float], None]) -> Any:
    """A progress bar class that draws nothing and reports the fraction of the bytes."""

    class Counter(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            with open(os.devnull, "w") as nowhere:
                super().__init__(*args, **(kwargs | {"file": nowhere, "mininterval": float("inf")}))

        def display(self, *args: Any, **kwargs: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            moved(min(1.0, self.n / self.total) if self.unit == "B" and self.total else 0.0)
            return shown

    return Counter


def _explain(error: BaseException, model: str, revision: str | None) -> Exception:
    """One line that says what to do, for what a user can do something about."""

    def refuse(message: str) -> ConfigError:
        return ConfigError(message, setting="MIZZEN_MODEL")

    if isinstance(error, errors.GatedRepoError):
        return refuse(f"'{model}' is gated: accept its terms on its page and set HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"'{model}' has no revision '{revision}'", setting="MIZZEN_MODEL_REVISION")
    if isinstance(error, errors.RepositoryNotFoundError):
        return refuse(f"'{model}' is neither a local folder nor a model on the hub (or it is private: set HF_TOKEN)")
    if isinstance(error, errors.HFValidationError):
        return refuse(f"'{model}' is neither a local folder nor a Hugging Face id")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return refuse(f"'{model}' is neither a local folder nor downloaded before, and the hub cannot be reached")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return refuse(f"no space left to download '{model}': free some, or set HF_HOME to another disk")
    if isinstance(error, errors.HfHubHTTPError | OSError):
        return refuse(f"'{model}' cannot be downloaded: {_first_line(error)}")
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
