"""The download phase: what MIZZEN_MODEL may name, and what is said when it names nothing usable."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import msgspec
import pytest
import zmq
from gguf_files import write_gguf
from huggingface_hub import errors

from mizzen.config.config import ModelConfigSource
from mizzen.config.resolve import resolve
from mizzen.config.settings import Settings
from mizzen.errors import ConfigError
from mizzen.ipc.channels import address
from mizzen.ipc.messages import Fatal, ModelInfo, Ready, ToSupervisor
from mizzen.models import hub
from mizzen.models.prepare import prepare_model
from tiny import make_tiny_model


def prepare(model: Path | str, cache: Path, load_format: Any = "auto") -> ModelInfo:
    source = ModelConfigSource(
        model=str(model), revision=None, load_format=load_format, dtype="auto", cache_dir=str(cache)
    )
    return prepare_model(source, lambda fraction, detail: None)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.6}))
    assert prepare(folder, tmp_path) == ModelInfo(
        path=str(folder),
        weights=str(folder),
        name=str(folder),
        architecture="Qwen3ForCausalLM",
        vocab_size=259,
        context_length=512,
        eos_token_ids=(0, 2, 5),
        default_sampling={"temperature": 0.6},
    )


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert prepare("model", tmp_path).path == str(tmp_path / "model")


def test_a_gguf_file_keeps_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    info = prepare(path, tmp_path / "cache")
    assert info.weights == str(path)
    assert Path(info.path).is_relative_to(tmp_path / "cache")
    assert (info.architecture, info.eos_token_ids) == ("LlamaForCausalLM", (0, 2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/does/not/exist", "'/does/not/exist' does not exist"),
        ("./nor/this", "does not exist"),
        ("a/b/c", "does not exist"),
        ("missing.gguf", "'missing.gguf' does not exist"),
        ("has a space", "does not exist"),
    ],
)
def test_what_does_not_exist_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"MIZZEN_MODEL: .*{message}"):
        prepare(name, tmp_path)


def test_an_incomplete_folder_is_refused_before_loading(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match="no safetensors"):
        prepare(folder, tmp_path)
    prepare(folder, tmp_path, load_format="dummy")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        prepare(folder, tmp_path, load_format="dummy")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="MIZZEN_CACHE_DIR"):
        prepare(tmp_path / "model.gguf", tmp_path / "file")


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

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message) as caught:
        hub.download("org/model", "v9", weights=True, progress=lambda fraction, detail: None)
    assert "\n" not in str(caught.value)


def test_a_failure_nobody_expected_is_not_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        hub.download("org/model", None, weights=True, progress=lambda fraction, detail: None)


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

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    seen: list[float] = []

    def progress(fraction: float, detail: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(fraction)

    assert hub.download("org/model", None, weights=True, progress=progress) == Path("/somewhere")
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

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
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

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match="cannot be reached"):
        prepare("org/tiny", tmp_path)


@pytest.mark.parametrize("exists", [True, False])
def test_the_process_reports_the_model_or_a_configuration_error(exists: bool, tmp_path: Path) -> None:
    name = str(make_tiny_model(tmp_path / "model")) if exists else "/does/not/exist"
    config = resolve(Settings(model=name))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    context = zmq.Context()
    control = context.socket(zmq.ROUTER)
    control.bind(address(tmp_path, "control"))
    command = [sys.executable, "-m", "mizzen.models.prepare", "--run-dir", str(tmp_path), "--name", "prepare"]
    child = subprocess.Popen([*command, "--parent", str(os.getpid())])
    decoder = msgspec.msgpack.Decoder(ToSupervisor)
    try:
        last: Any = None
        while not isinstance(last, Ready | Fatal):
            assert control.poll(30000)
            last = decoder.decode(control.recv_multipart()[1])
            assert isinstance(last, Ready | Fatal) or last.phase == "download"
        code = child.wait(timeout=30)
    finally:
        child.kill()
        context.destroy(linger=0)
    if exists:
        assert (code, last.model.path) == (0, name)
    else:
        assert (code, last.exit_code) == (78, 78)
        assert last.message == "MIZZEN_MODEL: '/does/not/exist' does not exist"


def test_the_download_phase_does_not_load_torch(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    code = (
        "import sys; from pathlib import Path; from mizzen.models import prepare, gguf_folder;"
        f"gguf_folder.gguf_folder(Path({str(tmp_path)!r}) / 'model.gguf', Path({str(tmp_path)!r}), lambda f, d: None);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
