"""Hugging Face's hub. Files that are whole are kept; one that was not begins anew: its client does not resume it."""

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, snapshot_download
from tqdm import tqdm

from mizzen.errors import ConfigError
from mizzen.hub import IGNORED, Moved, first_line

ABANDONED_S = 120.0  # a download that goes on writes far more often, or has failed


def snapshot(model: str, revision: str | None, patterns: list[str], moved: Moved) -> str:
    drop_abandoned(Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs")
    return snapshot_download(
        model,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=IGNORED,
        tqdm_class=_counter(moved),
    )


def drop_abandoned(blobs: Path) -> None:
    """Removes parts of files that a killed download left: nobody reads them again, and they are as large as weights."""
    for part in blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):  # another process was first, or the cache is read-only
            if time.time() - part.stat().st_mtime > ABANDONED_S:
                part.unlink()


def _counter(moved: Moved) -> Any:
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


def explain(error: BaseException, model: str, revision: str | None) -> Exception:
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
        return refuse(f"'{model}' cannot be downloaded: {first_line(error)}")
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
