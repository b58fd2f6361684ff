"""A start that cannot succeed: one line that names the setting, exit code 78, no retry and nothing left."""

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.running import Server
from tiny import make_tiny_model

BOOT_TIMEOUT_S = 60.0

Refuse = Callable[..., str]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """The model's folder, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def refuse(tiny: Path, tmp_path: Path) -> Iterator[Refuse]:
    """Starts a server that must refuse to, checks what is the same for all refusals, and returns the line."""
    with contextlib.ExitStack() as stack:

        def refuse(model: Path | str | None = None, **settings: Any) -> str:
            server = Server(tiny if model is None else model, tmp_path, **settings)  # type: ignore[arg-type]  # any name will do
            stack.callback(server.close)
            assert server.process.wait(BOOT_TIMEOUT_S) == 78, server.log()
            server.wait_nothing_left()
            line = server.termination_log.read_text()
            assert line.endswith("\n")
            line = line.rstrip("\n")
            assert line
            assert "\n" not in line
            log = server.log()
            assert "Traceback" not in log
            assert len([entry for entry in log.splitlines() if line in entry]) == 1, log
            return line

        yield refuse


# ---- found before any process is started: fast ----


def test_no_model_at_all(refuse: Refuse) -> None:
    assert "MIZZEN_MODEL is not set" in refuse(model="")


def test_an_unknown_variable(refuse: Refuse) -> None:
    assert (
        refuse(max_model_length=100) == "MIZZEN_MAX_MODEL_LENGTH is not a setting; the nearest is MIZZEN_MAX_MODEL_LEN"
    )


def test_a_wrong_value(refuse: Refuse) -> None:
    assert refuse(page_size=0) == "MIZZEN_PAGE_SIZE is '0', but must be: 1 to 256"


@pytest.mark.parametrize("setting", ["port", "health_port"])
def test_a_port_that_is_taken(refuse: Refuse, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refuse(**{setting: port})
    assert line == f"MIZZEN_{setting.upper()}: 127.0.0.1:{port} is taken: another process listens there"


def test_a_keys_file_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    line = refuse(api_keys_file=tmp_path / "keys")
    assert line == f"MIZZEN_API_KEYS_FILE: cannot read {tmp_path}/keys: No such file or directory"


def test_a_keys_file_that_cannot_be_read(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()  # permissions do not stop root
    assert refuse(api_keys_file=tmp_path / "keys").startswith("MIZZEN_API_KEYS_FILE: cannot read")


def test_a_chat_template_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    line = refuse(chat_template=tmp_path / "chat.jinja")
    assert line == f"MIZZEN_CHAT_TEMPLATE: there is no file {tmp_path}/chat.jinja"


# ---- found by a process ----


def test_a_folder_that_is_not_there(refuse: Refuse) -> None:
    assert refuse("/no/such/model") == "MIZZEN_MODEL: '/no/such/model' does not exist"


@pytest.mark.slow
def test_a_folder_without_a_model(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refuse(tmp_path / "empty") == f"MIZZEN_MODEL: '{tmp_path}/empty' has no config.json"


@pytest.mark.slow
def test_an_unknown_architecture(refuse: Refuse, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    line = refuse(copy)
    assert line.startswith("MIZZEN_MODEL: architecture MambaForCausalLM is not supported; supported are Llama")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_corrupt_safetensors(refuse: Refuse, copy: Path, damage: str) -> None:
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(
        {"truncated": data[: len(data) // 2], "garbage": b"\xff" * 64 + data[64:], "empty": b""}[damage]
    )
    line = refuse(copy)
    assert line.startswith(f"MIZZEN_MODEL: '{weights}' is not a readable safetensors file: ")


@pytest.mark.slow
def test_weights_that_are_not_there(refuse: Refuse, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert refuse(copy) == f"MIZZEN_MODEL: '{copy}' has no safetensors weights"


@pytest.mark.slow
def test_a_tokenizer_that_is_not_json(refuse: Refuse, copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{not json")
    assert refuse(copy).startswith("MIZZEN_MODEL: ")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kv_cache_bytes": 8192}, {"kv_cache_bytes": "auto", "memory_fraction": 1e-9}])
def test_no_memory_for_one_page(refuse: Refuse, settings: dict[str, Any]) -> None:
    line = refuse(**settings)
    setting = list(settings)[-1]
    assert line.startswith("the KV cache fits no page of 8192 bytes: raise ")
    assert f"raise MIZZEN_{setting.upper()} (now {settings[setting]};" in line


@pytest.mark.slow
def test_no_memory_on_two_ranks_is_one_line_too(refuse: Refuse) -> None:
    """The rank that says so leaves the other alone in a collective: that one's failure must not drown the reason."""
    line = refuse(tensor_parallel_size=2, kv_cache_bytes=4096)
    assert line.startswith("the KV cache fits no page of 4096 bytes: raise MIZZEN_KV_CACHE_BYTES (now 4096;")


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_model(refuse: Refuse) -> None:
    line = refuse(tensor_parallel_size=3)
    assert line.startswith("MIZZEN_TENSOR_PARALLEL_SIZE=3 does not divide this model's 4 attention heads: ")


@pytest.mark.slow
def test_a_length_over_the_model_s_context(refuse: Refuse) -> None:
    assert refuse(max_model_len=1000) == "MIZZEN_MAX_MODEL_LEN is 1000, but the model's context is 512"


@pytest.mark.slow
def test_a_length_over_the_pool(refuse: Refuse) -> None:
    line = refuse(max_model_len=512, kv_cache_bytes=8192 * 11)
    assert line == (
        "MIZZEN_MAX_MODEL_LEN is 512, but the KV cache holds 160 tokens: lower it, or raise"
        " MIZZEN_MEMORY_FRACTION or MIZZEN_KV_CACHE_BYTES"
    )


@pytest.mark.slow
@pytest.mark.parametrize("template", ["{% for message in messages %}{{ message.content }}", "{{ \xff }}"])
def test_a_broken_chat_template(refuse: Refuse, tmp_path: Path, template: str) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(template.encode("latin-1"))
    assert refuse(chat_template=path).startswith("MIZZEN_CHAT_TEMPLATE: ")


@pytest.mark.slow
def test_an_attention_backend_that_is_not_here(refuse: Refuse) -> None:
    assert "MIZZEN_ATTENTION_BACKEND" in refuse(attention_backend="nonsense")
