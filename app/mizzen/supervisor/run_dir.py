"""The private run directory: 0700, unpredictable name, path short enough for Unix sockets; made and removed here."""

import shutil
import tempfile
from pathlib import Path

import msgspec

from mizzen.config.config import Config
from mizzen.errors import ConfigError
from mizzen.ipc.messages import ModelInfo

MAX_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path less its final zero
LONGEST_NAME = "/tokenizer-63.sock"


def create(parent: str | None, setting: str = "MIZZEN_RUN_DIR") -> Path:
    """Makes the directory in ``parent``, or where temporary files go. Raises ConfigError if it cannot serve."""
    try:
        path = Path(tempfile.mkdtemp(prefix="mizzen-", dir=parent)).resolve()  # mkdtemp's mode is 0700
    except OSError as error:  # without a parent, also that no temporary folder can be written
        where = f"in {parent}" if parent else "for sockets: a container with a read-only root needs a tmpfs on /tmp"
        raise ConfigError(f"cannot make a folder {where}: {error.strerror}", setting=setting) from error
    if len(str(path).encode()) + len(LONGEST_NAME) > MAX_SOCKET_PATH:
        remove(path)
        raise ConfigError(f"{path.parent} is too long a path for Unix sockets: choose a shorter one", setting=setting)
    return path


def write_config(run_dir: Path, config: Config) -> None:
    _write(run_dir / "config.json", msgspec.json.encode(config))


def write_model(run_dir: Path, model: ModelInfo) -> None:
    _write(run_dir / "model.json", msgspec.json.encode(model))


def remove(run_dir: Path) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, for whoever reads meanwhile; readable by this user only (it may hold API keys)."""
    draft = path.with_suffix(".draft")
    try:
        draft.touch(mode=0o600)
        draft.write_bytes(data)
        draft.replace(path)
    except OSError as error:  # a full disk
        raise ConfigError(f"cannot write in {path.parent}: {error.strerror}", setting="MIZZEN_RUN_DIR") from error
