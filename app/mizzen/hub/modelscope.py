"""ModelScope's hub. Its client resumes files by ranges, and checks them by their hashes."""

import errno
import threading
from collections.abc import Iterator
from fnmatch import fnmatch

from huggingface_hub import constants

from mizzen.errors import ConfigError
from mizzen.hub import IGNORED, Moved, first_line

try:
    from modelscope_hub import HubApi, HubConfig, ProgressCallback, errors
except ImportError as error:
    raise ConfigError(
        "'modelscope' needs the package modelscope-hub: pip install 'mizzen[modelscope]'",
        setting="MIZZEN_MODEL_SOURCE",
    ) from error

KIND = "model"


def snapshot(model: str, revision: str | None, patterns: list[str], moved: Moved) -> str:
    api = HubApi(HubConfig())
    if constants.HF_HUB_OFFLINE:  # one variable for both hubs
        return str(api.download_repo(model, KIND, revision=revision, local_files_only=True))
    api = HubApi(HubConfig(endpoint=api.resolve_endpoint_for_read(model)))
    files = api.list_repo_files(model, KIND, revision=revision)
    total = sum(file.size for file in files if _is_wanted(file.path, patterns))
    return str(
        api.download_repo(
            model,
            KIND,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=IGNORED,
            progress_callbacks=[_counter(total, moved)],
        )
    )


def _is_wanted(path: str, patterns: list[str]) -> bool:
    return any(fnmatch(path, wanted) for wanted in patterns) and not any(fnmatch(path, left) for left in IGNORED)


def _counter(total: int, moved: Moved) -> type:
    """A callback class of which the client makes an object a file; all count together."""
    lock, here = threading.Lock(), 0

    class Counter(ProgressCallback):
        def update(self, size: int) -> None:
            nonlocal here
            with lock:
                here += size
                moved(min(1.0, here / max(1, total)))

    return Counter


def explain(error: BaseException, model: str, revision: str | None) -> Exception:
    """One line that says what to do, for what a user can do something about."""

    def refuse(message: str) -> ConfigError:
        return ConfigError(message, setting="MIZZEN_MODEL")

    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return refuse(f"no space left to download '{model}': free some, or set MODELSCOPE_CACHE to another disk")
    if any(isinstance(cause, errors.AuthenticationError | errors.PermissionDeniedError) for cause in causes):
        return refuse(f"'{model}' is gated or private: accept its terms on its page and set MODELSCOPE_API_TOKEN")
    if any(isinstance(cause, errors.NotExistError) for cause in causes):
        which = f" with a revision '{revision}'" if revision else ""
        return refuse(f"'{model}' is neither a local folder nor a model on ModelScope{which}")
    if isinstance(error, errors.CacheNotFound | errors.NetworkError):
        return refuse(f"'{model}' is neither a local folder nor downloaded before, and ModelScope cannot be reached")
    if isinstance(error, errors.HubError | OSError):
        return refuse(f"'{model}' cannot be downloaded: {first_line(causes[-1])}")
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """It, what it came of, and if it stands for several files what each of them failed of."""
    while error is not None:
        yield error
        if isinstance(error, errors.FileDownloadError):
            for failure in error.failed_files.values():
                yield from _causes(failure)
        error = error.__cause__ or error.__context__
