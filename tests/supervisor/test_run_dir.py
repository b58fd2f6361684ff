"""The run directory on a disk that is full."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mizzen.config.resolve import resolve
from mizzen.config.settings import Settings
from mizzen.errors import ConfigError
from mizzen.supervisor import run_dir


def test_a_full_disk_is_one_line_that_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_dir.create(str(tmp_path))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError) as caught:
        run_dir.write_config(folder, resolve(Settings(model="m", device="cpu")))
    assert str(caught.value) == f"MIZZEN_RUN_DIR: cannot write in {folder}: No space left on device"
    assert not (folder / "config.json").exists()
