"""Settings: where they come from, what is refused and how it is said."""

import os
from pathlib import Path

import pytest

from mizzen.config.config import Config
from mizzen.config.reference import BEGIN, END, embedded, render
from mizzen.config.resolve import describe, resolve
from mizzen.config.settings import Settings, is_service_link, load_settings, termination_log
from mizzen.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("MIZZEN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MIZZEN_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)  # no .env file


def config_of(**flags: str) -> Config:
    return resolve(load_settings({"model": "org/model", **flags}).settings)


def refusal(**flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(**flags)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("page_size", "0", "1 to 256"),
        ("page_size", "257", "1 to 256"),
        ("page_size", "many", "1 to 256"),
        ("page_size", "1.5", "1 to 256"),
        ("port", "0", "1 to 65535"),
        ("port", "65536", "1 to 65535"),
        ("health_port", "-1", "0 to 65535"),
        ("memory_fraction", "0", "over 0 to 1"),
        ("memory_fraction", "1.01", "over 0 to 1"),
        ("memory_fraction", "nan", "over 0 to 1"),
        ("request_timeout_s", "inf", "over 0 to 86400"),
        ("drain_timeout_s", "-1", "0 to 86400"),
        ("threads", "0", "auto, or 1 to 1024"),
        ("threads", "all", "auto, or 1 to 1024"),
        ("max_model_len", "1", "auto, or 2 to 16777216"),
        ("kv_cache_bytes", "lots", "auto, or 1 to"),
        ("kv_cache_bytes", "0", "auto, or 1 to"),
        ("max_body_bytes", "-5", "bytes"),
        ("scheduling_policy", "lifo", "fcfs, priority, longest-prefix or longest-output"),
        ("prefix_cache", "RADIX!", "radix or none"),
        ("dtype", "int4", "auto, float32, bfloat16 or float16"),
        ("device", "tpu", "auto, cpu or cuda"),
        ("attention_backend", "a,b,c", "sdpa"),
        ("engine_cpus", "0;1", "a core's number for each rank"),
        ("log_level", "loud", "debug, info, warning or error"),
        ("max_restarts", "-1", "0 to 1000"),
    ],
)
def test_a_wrong_value_names_the_variable_the_value_and_what_is_allowed(
    field: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"MIZZEN_{field.upper()}"
    [line] = refusal(**{field: value})
    assert line.startswith(f"{name} (--{field.replace('_', '-')}) is {value!r}, but must be: ")
    assert allowed in line
    monkeypatch.setenv(name, value)
    [line] = refusal()
    assert line.startswith(f"{name} is {value!r}, but must be: ")


def test_every_problem_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIZZEN_PAGE_SIZ", "1")
    monkeypatch.setenv("MIZZEN_THREADS", "x")
    names = [line.split()[0] for line in refusal(page_size="0")]
    assert sorted(names) == ["MIZZEN_PAGE_SIZ", "MIZZEN_PAGE_SIZE", "MIZZEN_THREADS"]


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ({"model": ""}, "MIZZEN_MODEL"),
        ({"served_model_name": " , "}, "MIZZEN_SERVED_MODEL_NAME"),
        ({"api_keys": " , "}, "MIZZEN_API_KEYS"),
        ({"api_keys": "good,b\u00e4d"}, "MIZZEN_API_KEYS"),
        ({"api_keys_file": "/nowhere/keys"}, "MIZZEN_API_KEYS_FILE"),
        ({"chat_template": "/nowhere/template"}, "MIZZEN_CHAT_TEMPLATE"),
        ({"port": "8001"}, "MIZZEN_HEALTH_PORT"),
        ({"max_batch_tokens": "8", "max_running_requests": "9"}, "MIZZEN_MAX_BATCH_TOKENS"),
        ({"engine_cpus": "4000"}, "MIZZEN_ENGINE_CPUS"),
        ({"engine_cpus": "0", "tensor_parallel_size": "2"}, "MIZZEN_ENGINE_CPUS"),
        ({"engine_cpus": "0,0", "tensor_parallel_size": "2"}, "MIZZEN_ENGINE_CPUS"),
    ],
)
def test_what_only_resolving_finds_names_the_setting(flags: dict[str, str], setting: str) -> None:
    [line] = refusal(**flags)
    assert line.startswith(setting)


def test_a_core_that_this_process_may_not_use_is_named_beside_those_that_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3}, raising=False)
    assert config_of(engine_cpus="3,2", tensor_parallel_size="2").engine.cpus == (3, 2)
    assert config_of().engine.cpus == ()
    [line] = refusal(engine_cpus="3,5", tensor_parallel_size="2")
    assert line == "MIZZEN_ENGINE_CPUS names core 5, but this process may use 2, 3"


@pytest.mark.parametrize(
    ("gpus", "written", "device", "ranks"),
    [
        (0, {}, "cpu", 1),
        (0, {"tensor_parallel_size": "auto"}, "cpu", 1),
        (0, {"tensor_parallel_size": "2"}, "cpu", 2),
        (4, {}, "cuda", 1),
        (4, {"tensor_parallel_size": "2"}, "cuda", 2),
        (4, {"tensor_parallel_size": "auto"}, "cuda", 4),
        (4, {"tensor_parallel_size": "auto", "device": "cpu"}, "cpu", 1),
    ],
)
def test_auto_splits_the_model_over_all_gpus(
    gpus: int, written: dict[str, str], device: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mizzen.config.resolve.cuda_device_count", lambda: gpus)
    engine = config_of(**({"device": "auto"} | written)).engine
    assert (engine.device, engine.tensor_parallel_size) == (device, ranks)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen.config.resolve.cuda_device_count", lambda: 2)
    assert refusal(device="cuda", tensor_parallel_size="4") == [
        "MIZZEN_TENSOR_PARALLEL_SIZE is 4, but there are 2 GPUs"
    ]


def test_cores_are_named_for_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen.config.resolve.cuda_device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3}, raising=False)
    [line] = refusal(device="cuda", tensor_parallel_size="auto", engine_cpus="3")
    assert "must name 2 different cores" in line


def test_an_unknown_variable_is_reported_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIZZEN_MAX_MODEL_LENGTH", "10")
    assert refusal() == ["MIZZEN_MAX_MODEL_LENGTH is not a setting; the nearest is MIZZEN_MAX_MODEL_LEN"]


def test_an_unknown_variable_in_the_env_file_is_reported_too() -> None:
    Path(".env").write_text("MIZZEN_PORTT=1\nOTHER=2\n")
    assert refusal() == ["MIZZEN_PORTT is not a setting; the nearest is MIZZEN_PORT"]


LINKS = {
    "MIZZEN_PORT": "tcp://10.0.0.1:8000",
    "MIZZEN_HEALTH_PORT": "tcp://10.0.0.1:8001",
    "MIZZEN_SERVICE_HOST": "10.0.0.1",
    "MIZZEN_SERVICE_PORT": "8000",
    "MIZZEN_SERVICE_PORT_HTTP": "8000",
    "MIZZEN_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "MIZZEN_PORT_8000_TCP_PROTO": "tcp",
    "MIZZEN_PORT_8000_TCP_PORT": "8000",
    "MIZZEN_PORT_8000_TCP_ADDR": "10.0.0.1",
    "MIZZEN_METRICS_SERVICE_HOST": "10.0.0.2",
    "MIZZEN_METRICS_SERVICE_PORT": "9000",
    "MIZZEN_METRICS_PORT": "tcp://10.0.0.2:9000",
    "MIZZEN_METRICS_PORT_53_UDP_ADDR": "10.0.0.2",
}


def test_service_links_are_neither_obeyed_nor_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    loaded = load_settings({"model": "m"})
    assert loaded.service_links == tuple(sorted(LINKS))
    assert (loaded.settings.port, loaded.settings.health_port) == (8000, 8001)


def test_a_service_link_does_not_hide_the_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIZZEN_PORT", "tcp://10.0.0.1:8000")
    Path(".env").write_text("MIZZEN_PORT=9000\n")
    assert load_settings({"model": "m"}).settings.port == 9000


@pytest.mark.parametrize(
    ("name", "value"),
    [("MIZZEN_PORT", "9000"), ("MIZZEN_PORT", "tcp"), ("MIZZEN_HOST", "tcp://x"), ("MIZZEN_MODEL", "m")],
)
def test_what_a_person_wrote_is_no_service_link(name: str, value: str) -> None:
    assert not is_service_link(name, value)


def test_flags_win_over_the_environment_and_that_over_the_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("MIZZEN_PAGE_SIZE=1\nMIZZEN_SEED=1\nMIZZEN_PORT=1001\n")
    monkeypatch.setenv("MIZZEN_PAGE_SIZE", "2")
    monkeypatch.setenv("MIZZEN_SEED", "2")
    settings = load_settings({"page_size": "3"}).settings
    assert (settings.page_size, settings.seed, settings.port) == (3, 2, 1001)


def test_an_empty_variable_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIZZEN_API_KEYS", "")
    monkeypatch.setenv("MIZZEN_PAGE_SIZE", "")
    assert load_settings().settings == Settings(_env_file=None)


def test_auto_is_decided_once() -> None:
    config = config_of()
    assert config.engine.device == "cpu"
    assert config.engine.scheduler.max_batch_tokens == 256
    assert config.engine.scheduler.max_running_requests == 64
    assert config.engine.scheduler.max_model_len is None
    assert config.engine.model.dtype == "float32"
    assert config.engine.threads >= 1
    assert config.engine.cache.kv_cache_bytes is None


def test_batch_limits_follow_each_other() -> None:
    assert config_of(max_batch_tokens="16").engine.scheduler.max_running_requests == 16
    assert config_of(max_running_requests="500").engine.scheduler.max_batch_tokens == 500


def test_sizes_may_have_units() -> None:
    assert config_of(kv_cache_bytes="512MiB").engine.cache.kv_cache_bytes == 512 * 2**20
    assert config_of(max_body_bytes="1MiB").server.max_body_bytes == 2**20


def test_the_bind_is_loopback_without_keys_and_open_with() -> None:
    assert config_of().server.host == config_of().server.health_host == "127.0.0.1"
    assert config_of(api_keys="k").server.host == "0.0.0.0"
    assert config_of(host="10.0.0.5").server.health_host == "10.0.0.5"
    assert config_of(host="10.0.0.5", health_host="::1").server.health_host == "::1"


def test_the_model_gives_its_name_unless_names_are_given(tmp_path: Path) -> None:
    (tmp_path / "some-model").mkdir()
    assert config_of(model="org/model").server.served_model_names == ("org/model",)
    assert config_of(model=str(tmp_path / "some-model") + "/").server.served_model_names == ("some-model",)
    assert config_of(model="some-model").server.served_model_names == ("some-model",)
    assert config_of(model="/x/y.Q4.gguf").server.served_model_names == ("y.Q4",)
    assert config_of(served_model_name="a, b,a").server.served_model_names == ("a", "b")


def test_keys_come_from_the_variable_and_the_file_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfile-key-1\n\nfile-key-2 # expires\nkey-1\n")
    config = config_of(api_keys="key-1, key-2", api_keys_file=str(file))
    assert config.server.api_keys == ("key-1", "key-2", "file-key-1", "file-key-2")
    assert "key-" not in str(describe(config))
    settings = load_settings({"model": "m", "api_keys": "key-1"}).settings
    assert "key-1" not in repr(settings)


def test_a_bad_key_is_not_shown_either(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("fine\nsecret\x01thing\n")
    [line] = refusal(api_keys_file=str(file))
    assert "key 2" in line
    assert "thing" not in line


def test_an_empty_keys_file_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    assert "holds no key" in refusal(api_keys_file=str(tmp_path / "keys"))[0]


def test_the_termination_log_is_found_though_other_settings_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert termination_log({}) is None
    Path(".env").write_text("MIZZEN_TERMINATION_LOG=/file\nMIZZEN_PORT=x\n")
    assert termination_log({}) == "/file"
    monkeypatch.setenv("MIZZEN_TERMINATION_LOG", "/env")
    assert termination_log({}) == "/env"
    assert termination_log({"termination_log": "/flag"}) == "/flag"


def test_every_setting_has_a_description_and_says_what_is_allowed() -> None:
    table = render()
    for name in Settings.model_fields:
        [row] = [line for line in table.splitlines() if line.startswith(f"| `MIZZEN_{name.upper()}` |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4
        assert cells[2]
        assert cells[3].endswith(".")


def test_the_reference_is_found_between_its_markers() -> None:
    assert embedded(f"before\n{BEGIN}\n\n{render()}\n{END}\nafter") == render()
    assert embedded("no markers") is None
