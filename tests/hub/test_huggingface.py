"""Models of Hugging Face's hub: what is fetched from a stand-in on loopback, and what is said where it cannot be."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from mizzen.config.config import ModelConfigSource
from mizzen.errors import ConfigError
from mizzen.hub import download, huggingface
from mizzen.ipc.messages import ModelInfo
from mizzen.models.prepare import prepare_model
from tiny import make_tiny_model


def prepare(model: str, cache: Path, load_format: Any = "auto") -> ModelInfo:
    source = ModelConfigSource(model=model, revision=None, load_format=load_format, dtype="auto", cache_dir=str(cache))
    return prepare_model(source, lambda fraction, detail: None)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError, 403), "gated.*HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError, 404), "neither a local folder nor a model on the hub"),
        (http_error(errors.RevisionNotFoundError, 404), "MIZZEN_MODEL_REVISION: .*revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (errors.HFValidationError("x"), "nor a Hugging Face id"),
        (OSError(errno.ENOSPC, "full"), "no space left"),
        (http_error(errors.HfHubHTTPError, 500), "cannot be downloaded"),
    ],
)
def test_each_failure_of_a_download_says_what_to_do(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message) as caught:
        download("huggingface", "org/model", "v9", weights=True, progress=lambda fraction, detail: None)
    assert "\n" not in str(caught.value)


def test_a_failure_nobody_expected_is_not_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        download("huggingface", "org/model", None, weights=True, progress=lambda fraction, detail: None)


def test_progress_comes_in_the_callers_thread_and_only_when_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = threading.Event()

    def snapshot(*args: Any, tqdm_class: Any, **kwargs: Any) -> str:
        bar = tqdm_class(total=100, unit="B", name="download")
        for _ in range(4):
            bar.update(25)
            time.sleep(0.25)
        stalled.set()
        time.sleep(0.7)
        return "/somewhere"

    monkeypatch.setattr(huggingface, "snapshot_download", snapshot)
    seen: list[float] = []

    def progress(fraction: float, detail: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(fraction)

    assert download("huggingface", "org/model", None, weights=True, progress=progress) == Path("/somewhere")
    assert stalled.is_set()
    assert seen[0] == 0.0
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) <= 5


@pytest.fixture
def local_hub(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A hub on loopback that has one model, org/tiny. Yields its URL, the model's folder and the files asked for."""
    folder = make_tiny_model(tmp_path / "published", "llama", shards=2)
    (folder / "consolidated.safetensors").write_bytes(b"a second copy")
    (folder / "README.md").write_text("not needed")
    asked: list[str] = []
    commit = "a" * 40

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            files = sorted(file.name for file in folder.iterdir())
            if path.startswith("/api/models/org/tiny/tree/"):
                tree = [{"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": f} for f in files]
                self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            elif path.startswith("/api/models/org/tiny"):
                info = {"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": f} for f in files]}
                self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            elif path.startswith("/org/tiny/resolve/"):
                name = path.rpartition("/")[2]
                if self.command == "GET":
                    asked.append(name)
                self.answer(200, (folder / name).read_bytes(), {"ETag": f'"{name}"', "X-Repo-Commit": commit})
            else:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder, asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def from_hub(
    local_hub: tuple[str, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], ModelInfo]:
    """prepare_model against the local hub, with an empty cache of its own."""

    def snapshot(*args: Any, **kwargs: Any) -> Any:
        return huggingface_hub.snapshot_download(
            *args, **kwargs, endpoint=local_hub[0], cache_dir=tmp_path / "hub", token=False
        )

    monkeypatch.setattr(huggingface, "snapshot_download", snapshot)
    return lambda name, load_format: prepare(name, tmp_path, load_format)


def test_a_model_of_the_hub_is_downloaded_without_what_is_not_needed(
    local_hub: tuple[str, Path, list[str]], from_hub: Callable[[str, str], ModelInfo]
) -> None:
    info = from_hub("org/tiny", "auto")
    assert info.name == "org/tiny"
    assert "consolidated.safetensors" not in local_hub[2]
    assert "README.md" not in local_hub[2]
    for file in ("config.json", "tokenizer.json", "model-00002-of-00002.safetensors"):
        assert (Path(info.path) / file).read_bytes() == (local_hub[1] / file).read_bytes()


def test_dummy_weights_need_no_download(
    local_hub: tuple[str, Path, list[str]], from_hub: Callable[[str, str], ModelInfo]
) -> None:
    from_hub("org/tiny", "dummy")
    assert not [name for name in local_hub[2] if name.endswith(".safetensors")]


def test_a_model_the_hub_does_not_have_is_refused(from_hub: Callable[[str, str], ModelInfo]) -> None:
    with pytest.raises(ConfigError, match="'org/huge' is neither a local folder nor a model on the hub"):
        from_hub("org/huge", "auto")


def test_a_hub_that_is_down_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot(*args: Any, **kwargs: Any) -> Any:
        return huggingface_hub.snapshot_download(
            *args, **kwargs, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "hub", token=False
        )

    monkeypatch.setattr(huggingface, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match="cannot be reached"):
        prepare("org/tiny", tmp_path)


def test_what_a_killed_download_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    old, new, whole = (tmp_path / name for name in ("a.1.incomplete", "b.2.incomplete", "c"))
    for file in (old, new, whole):
        file.write_bytes(b"x")
    for file in (old, whole):
        os.utime(file, (0, time.time() - huggingface.ABANDONED_S - 1))
    huggingface.drop_abandoned(tmp_path)
    assert not old.exists()
    assert new.exists()
    assert whole.exists()
    huggingface.drop_abandoned(tmp_path / "nothing was downloaded yet")
