"""Models of ModelScope's hub, from a stand-in on loopback that its own client asks."""

import errno
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import huggingface_hub
import pytest
from modelscope_hub import errors

from mizzen.config.config import ModelConfigSource
from mizzen.errors import ConfigError
from mizzen.hub import download, modelscope
from mizzen.models.prepare import prepare_model
from tiny import make_tiny_model

WEIGHTS = "model-00002-of-00002.safetensors"


class Scope:
    """What the stand-in has, does and was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.asked: list[tuple[str, str | None]] = []  # (file, its range)
        self.cut_at: int | None = None  # bytes after which a body of weights ends
        self.refuse = 0  # a status for each request


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scope]:
    """ModelScope with one model, org/tiny."""
    scope = Scope(make_tiny_model(tmp_path / "published", "llama", shards=2))
    (scope.folder / "README.md").write_text("not needed")
    (scope.folder / "consolidated.safetensors").write_bytes(b"a second copy")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", headers.pop("length", str(len(body))))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def json(self, data: Any) -> None:
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": data}).encode())

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            if scope.refuse:
                self.answer(scope.refuse, b'{"Code": 1, "Message": "no"}')
            elif parts.path == "/api/v1/models/org/tiny/repo/files":
                files = sorted(path for path in scope.folder.iterdir() if path.is_file())
                self.json({"Files": [entry(path) for path in files]})
            elif parts.path == "/api/v1/models/org/tiny/repo":
                self.file(query["FilePath"][0])
            else:
                self.answer(404, b'{"Code": 10010205001, "Message": "not found"}')

        def file(self, name: str) -> None:
            whole, wanted = (scope.folder / name).read_bytes(), self.headers.get("Range")
            scope.asked.append((name, wanted))
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
            start = int(found[1]) if found else 0
            stop = int(found[2]) + 1 if found and found[2] else len(whole)
            body = whole[start:stop]
            about = {"Content_Range": f"bytes {start}-{stop - 1}/{len(whole)}"} if found else {}
            if name == WEIGHTS and scope.cut_at is not None:
                self.answer(206 if found else 200, body[: scope.cut_at], length=str(len(body)), **about)
                self.close_connection = True
            else:
                self.answer(206 if found else 200, body, **about)

        do_HEAD = do_GET

    def entry(path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        return {"Path": path.name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        scope.url = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "MODELSCOPE_ENDPOINT": scope.url,
            "MODELSCOPE_CACHE": str(tmp_path / "cache"),
            "MODELSCOPE_HOME": str(tmp_path / "home"),
        }.items():
            monkeypatch.setenv(name, value)
        yield scope
        server.shutdown()
        thread.join(10)


def get(model: str = "org/tiny", seen: list[float] | None = None, *, weights: bool = True) -> Path:
    def progress(fraction: float, detail: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        if seen is not None:
            seen.append(fraction)

    return download("modelscope", model, None, weights=weights, progress=progress)


def test_a_model_is_downloaded_without_what_is_not_needed(scope: Scope, tmp_path: Path) -> None:
    source = ModelConfigSource("org/tiny", None, "auto", "auto", str(tmp_path), "modelscope")
    seen: list[float] = []
    info = prepare_model(source, lambda fraction, detail: seen.append(fraction))
    assert info.name == "org/tiny"
    assert {"consolidated.safetensors", "README.md"} & {name for name, _ in scope.asked} == set()
    for file in ("config.json", "tokenizer.json", WEIGHTS):
        assert (Path(info.path) / file).read_bytes() == (scope.folder / file).read_bytes()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_dummy_weights_need_no_download(scope: Scope) -> None:
    get(weights=False)
    assert not [name for name, _ in scope.asked if name.endswith(".safetensors")]


def test_a_download_goes_on_where_it_stopped(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    scope.cut_at = 1000
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_RETRY_TIMES", 1)  # else it waits and goes on by itself
    with pytest.raises(ConfigError, match="'org/tiny' cannot be downloaded: "):
        get()
    before = len(scope.asked)
    scope.cut_at = None
    folder = get()
    assert (folder / WEIGHTS).read_bytes() == (scope.folder / WEIGHTS).read_bytes()
    [(name, wanted)] = [(name, wanted) for name, wanted in scope.asked[before:] if wanted]
    assert name == WEIGHTS
    assert int(wanted.removeprefix("bytes=").removesuffix("-")) >= 1000
    assert len(scope.asked) == before + 1, "nothing that was whole is asked for again"


def test_what_is_here_serves_without_a_network(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get()
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert get() == folder
    with pytest.raises(ConfigError, match="'org/other' is neither a local folder nor downloaded before"):
        get("org/other")


def test_a_model_that_is_not_there_is_refused(scope: Scope) -> None:
    with pytest.raises(ConfigError, match="'org/huge' is neither a local folder nor a model on ModelScope"):
        get("org/huge")


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_what_to_do(scope: Scope, status: int) -> None:
    scope.refuse = status
    with pytest.raises(ConfigError, match=r"is gated or private.*MODELSCOPE_API_TOKEN"):
        get()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.NetworkError("down"), "ModelScope cannot be reached"),
        (errors.FileDownloadError("1 of 2", failed_files={"w": OSError(errno.ENOSPC, "full")}), "no space left"),
        (errors.FileDownloadError("1 of 2", failed_files={"w": OSError("reset")}), "cannot be downloaded: reset"),
        (OSError(errno.EACCES, "denied"), "cannot be downloaded"),
    ],
)
def test_each_failure_is_one_line(error: Exception, message: str) -> None:
    said = modelscope.explain(error, "org/m", None)
    assert isinstance(said, ConfigError)
    assert message in str(said)
    assert "\n" not in str(said)
    assert str(said).startswith("MIZZEN_MODEL: 'org/m'") or "no space" in str(said)


def test_without_its_client_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    monkeypatch.delitem(sys.modules, "mizzen.hub.modelscope")
    with pytest.raises(ConfigError, match=r"MIZZEN_MODEL_SOURCE: .*pip install 'mizzen\[modelscope\]'"):
        get()
