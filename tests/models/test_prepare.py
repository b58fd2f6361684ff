"""The download phase: what MIZZEN_MODEL may name, and what is said when it names nothing usable."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from gguf_files import write_gguf

from mizzen.config.config import ModelConfigSource
from mizzen.config.resolve import resolve
from mizzen.config.settings import Settings
from mizzen.errors import ConfigError
from mizzen.ipc.channels import address
from mizzen.ipc.messages import Fatal, ModelInfo, Ready, ToSupervisor
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
