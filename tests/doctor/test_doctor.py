"""Each check of ``mizzen doctor`` against hosts that are made up, and the command on this one."""

import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from mizzen.config.config import Config
from mizzen.config.resolve import resolve
from mizzen.config.settings import Settings
from mizzen.doctor import checks, facts
from mizzen.doctor.checks import GIB, Check
from mizzen.doctor.facts import Driver, Facts, Folder, Gpu, read_driver
from mizzen.doctor.main import as_json, as_table, check_ports, diagnose, folders, main, run_checks
from mizzen.doctor.memory import num_parameters
from mizzen.doctor.model import check_fit, check_model, check_weights
from mizzen.models.config import ModelArchitecture, parse_architecture
from tiny import make_tiny_model

H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, 0)


def host(gpus: int = 0, *, link: facts.Link = "NVLink", gpu: Gpu = H200, **changed: Any) -> Facts:
    pairs = [(a, b) for a in range(gpus) for b in range(a + 1, gpus)]
    driver = Driver("580.95", (13, 0), (gpu,) * gpus, dict.fromkeys(pairs, link)) if gpus else None
    base: dict[str, Any] = {
        "driver": driver,
        "no_driver": "" if gpus else "NVML: Driver Not Loaded",
        "torch": "2.11.0+cu130" if gpus else "2.13.0+cpu",
        "torch_cuda": (13, 0) if gpus else None,
        "nccl": "2.28.9" if gpus else None,
        "cpus": 64,
        "memory_free_bytes": 64 * GIB,
        "shm_bytes": 4 * GIB,
        "open_files": 65_536,
        "locked_memory_bytes": None,
        "compilers": ("gcc", "cc"),
        "packages": {"triton": "3.6.0"} if gpus else {},
        "environment": {},
    }
    return Facts(**(base | changed))


def configured(ranks: int = 1, *, device: str = "cpu", **settings: Any) -> Config:
    """Settings for a device that need not be there."""
    settings = {"model": "m", "device": "cpu", "tensor_parallel_size": ranks, **settings}
    config = resolve(Settings(_env_file=None, **settings))  # type: ignore[call-arg]  # made by BaseSettings
    model = config.engine.model
    if device == "cuda" and settings.get("dtype", "auto") == "auto":
        model = msgspec.structs.replace(model, dtype="auto")
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, device=device, model=model))


CPU, ONE, FOUR = configured(), configured(device="cuda"), configured(4, device="cuda")


@pytest.mark.parametrize(
    ("check", "config", "on", "status", "words"),
    [
        (checks.check_driver, CPU, host(), "skip", "none is needed"),
        (checks.check_driver, ONE, host(), "fail", "Driver Not Loaded"),
        (checks.check_driver, ONE, host(1), "ok", "580.95"),
        (checks.check_driver, ONE, host(1, torch_cuda=(14, 0)), "fail", "update the driver"),
        (checks.check_torch, CPU, host(), "ok", "2.13.0+cpu"),
        (checks.check_torch, CPU, host(torch_cuda=(13, 0)), "warn", "no GPU is used"),
        (checks.check_torch, CPU, host(2, torch_cuda=None), "warn", "take the cuda image"),
        (checks.check_torch, ONE, host(1), "ok", "triton 3.6.0"),
        (checks.check_gpus, CPU, host(), "skip", "cpu"),
        (checks.check_gpus, FOUR, host(4), "ok", "4 x NVIDIA H200, 139.0 GiB"),
        (checks.check_gpus, FOUR, host(2), "fail", "2, but 4 ranks"),
        (checks.check_gpus, ONE, host(1, gpu=Gpu("Tesla T4", (7, 5), 15 * GIB, 15 * GIB, 0)), "fail", "8.0"),
        (checks.check_gpus, ONE, host(1, gpu=Gpu("H200", (9, 0), 140 * GIB, 9 * GIB, 2)), "warn", "2 processes"),
        (checks.check_links, ONE, host(1), "skip", "one rank"),
        (checks.check_links, FOUR, host(4), "ok", "NVLink between all 4"),
        (checks.check_links, FOUR, host(4, link="PCIe"), "warn", "PCIe"),
        (checks.check_links, FOUR, host(4, link="none"), "warn", "no direct link"),
        (checks.check_nccl, ONE, host(1), "skip", "one rank"),
        (checks.check_nccl, FOUR, host(4), "ok", "2.28.9"),
        (checks.check_nccl, FOUR, host(4, nccl=None), "fail", "not installed"),
        (checks.check_nccl, configured(2), host(), "skip", "gloo"),
        (checks.check_shm, FOUR, host(4), "ok", "4.0 GiB"),
        (checks.check_shm, FOUR, host(4, shm_bytes=2**26), "fail", "--shm-size"),
        (checks.check_shm, ONE, host(1, shm_bytes=2**26), "ok", "64 MiB"),
        (checks.check_limits, FOUR, host(4), "ok", "unlimited"),
        (checks.check_limits, FOUR, host(4, locked_memory_bytes=2**23), "warn", "memlock"),
        (checks.check_limits, CPU, host(locked_memory_bytes=2**23), "ok", "65536 open files"),
        (checks.check_limits, CPU, host(open_files=256), "warn", "ulimit -n"),
        (checks.check_cpu, FOUR, host(4), "ok", "64 cores"),
        (checks.check_cpu, FOUR, host(4, cpus=8), "warn", "two cores each"),
        (checks.check_compiler, CPU, host(compilers=()), "skip", "no compiler"),
        (checks.check_compiler, ONE, host(1), "ok", "gcc"),
        (checks.check_compiler, ONE, host(1, compilers=("c++",)), "fail", "gcc"),
    ],
)
def test_a_check_says_what_is_there_and_what_to_do(
    check: Any, config: Config, on: Facts, status: str, words: str
) -> None:
    found: Check = check(config, on)
    assert found.status == status
    assert words in f"{found.detail} {found.advice}"
    assert bool(found.advice) == (status in ("warn", "fail"))


def test_gpus_of_two_kinds_are_pointed_out() -> None:
    mixed = (H200, Gpu("NVIDIA H100", (9, 0), 80 * GIB, 80 * GIB, 0))
    on = host(driver=Driver("580.95", (13, 0), mixed, {(0, 1): "NVLink"}))
    found = checks.check_gpus(configured(2, device="cuda"), on)
    assert found.status == "warn"
    assert "NVIDIA H100 and NVIDIA H200" in found.detail


def test_folders_must_be_writable_and_have_room(tmp_path: Path) -> None:
    found = checks.check_folders(
        [
            ("good", Folder("/a", True, 9 * GIB)),
            ("locked", Folder("/b", False, 9 * GIB)),
            ("full", Folder("/c", True, GIB)),
        ]
    )
    assert [check.status for check in found] == ["ok", "fail", "warn"]
    missing = facts.look_at(str(tmp_path / "not" / "there"))
    assert missing.writable
    assert missing.free_bytes > 0
    names = dict(folders(configured(device="cuda", cache_dir="/x"), {"HF_HOME": "/y", "TRITON_CACHE_DIR": "/z"}))
    assert [folder.path for folder in names.values()][:3] == ["/x", "/y", "/z"]
    names = dict(folders(configured(model_source="modelscope"), {"HF_HOME": "/y", "MODELSCOPE_CACHE": "/m"}))
    assert names["cache: models"].path == "/m"


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({}, "ok", "only this host"),
        ({"api_keys": "a,b"}, "ok", "2 API keys"),
        ({"host": "0.0.0.0"}, "warn", "MIZZEN_API_KEYS_FILE"),
    ],
)
def test_an_open_api_is_pointed_out(settings: dict[str, str], status: str, words: str) -> None:
    found = checks.check_keys(configured(**settings))
    assert found.status == status
    assert words in f"{found.detail} {found.advice}"


def test_a_port_that_another_program_has_is_a_failure_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken.settimeout(0.1)
        found, running = check_ports(configured(port=taken.getsockname()[1], health_port=0))
    assert [(check.name, check.status, running) for check in found] == [("port", "fail", False)]
    assert "MIZZEN_PORT" in found[0].advice


def test_a_port_that_a_mizzen_has_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen.doctor.main.running_phase", lambda host, port: "serve")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        [found], running = check_ports(configured(port=taken.getsockname()[1], health_port=0))
    assert (found.status, running) == ("ok", True)
    assert "in phase serve" in found.detail


# ---- the model ----


def test_parameters_are_counted_as_the_checkpoint_has_them(smollm2: Path) -> None:
    with safe_open(smollm2 / "model.safetensors", framework="pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  # it is no dict
    total = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes)
    assert num_parameters(parse_architecture(smollm2)) == total


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parameters_of_tiny_models_are_counted_too(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        total = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  # it is no dict
    assert num_parameters(parse_architecture(folder)) == total


def test_a_model_is_found_described_and_refused(smollm2: Path, tmp_path: Path) -> None:
    found, arch = check_model(configured(model=str(smollm2)))
    assert found.status == "ok"
    assert "LlamaForCausalLM, 0.13 billion parameters; its weights are here" in found.detail
    assert arch is not None
    found, arch = check_model(configured(model=str(tmp_path / "nothing")))
    assert (found.status, arch) == ("fail", None)
    found, arch = check_model(configured(2, model=str(smollm2)))
    assert "does not divide this model's 9 attention heads" in found.detail
    assert found.advice == "MIZZEN_TENSOR_PARALLEL_SIZE=1 does"
    found, _ = check_model(configured(7, model=str(smollm2)))
    assert found.advice == "MIZZEN_TENSOR_PARALLEL_SIZE=3 does"
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    found, _ = check_model(configured(model=str(tmp_path)))
    assert (found.status, "its weights are not here (model.safetensors)" in found.detail) == ("fail", True)
    found, _ = check_model(configured(model=str(tmp_path), load_format="dummy"))
    assert found.status == "ok"


@pytest.fixture
def sharded(smollm2: Path, tmp_path: Path) -> Path:
    """A folder of two shards and their index; they are empty."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for shard in shards.values():
        (tmp_path / shard).touch()
    return tmp_path


def test_each_file_of_weights_must_be_there_and_readable(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(model=str(sharded))
    assert check_model(config)[0].status == "ok"
    with monkeypatch.context() as patched:  # the user of these tests may read all
        patched.setattr("os.access", lambda path, mode: path.name != "model-2.safetensors")
        found, _ = check_model(config)
    assert (found.status, f"may not read {sharded / 'model-2.safetensors'}" in found.detail) == ("fail", True)
    (sharded / "model-2.safetensors").unlink()
    found, _ = check_model(config)
    assert (found.status, "its weights are not here (model-2.safetensors)" in found.detail) == ("fail", True)
    (sharded / "model.safetensors.index.json").write_text("{}")
    found, arch = check_model(config)
    assert (found.status, arch) == ("fail", None)
    assert "names no weights" in found.detail


def test_a_download_must_fit_the_disk(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [sharded / "absent.safetensors"]
    found = check_weights("it", large(), files, may_download=True)
    free = shutil.disk_usage(sharded).free
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=60 * GIB))
    full = check_weights("it", large(), files, may_download=True)
    assert (full.status, "61.0 GiB to download, and 60.0 GiB of disk free" in full.detail) == ("fail", True)
    assert found.status == ("warn" if free > 62 * GIB else "fail")


def large(num_layers: int = 64) -> ModelArchitecture:
    """Qwen3-32B's shape, with the usual number of layers."""
    return ModelArchitecture(
        name="Qwen3ForCausalLM",
        family="qwen3",
        hidden_size=5120,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=25_600,
        vocab_size=151_936,
        rms_norm_eps=1e-6,
        rope=Any,  # type: ignore[arg-type]  # no check looks at it
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        context_length=40_960,
        sliding_window=None,
        dtype="bfloat16",
    )


def test_what_fits_is_worked_out_by_rank() -> None:
    assert round(num_parameters(large()) / 1e9, 2) == 32.76
    found = check_fit(FOUR, host(4), large())
    assert found.status == "ok"
    assert "15.3 GiB of weights" in found.detail
    alone = check_fit(ONE, host(1), large())
    assert alone.status == "ok"
    assert "61.0 GiB of weights" in alone.detail


def test_what_does_not_fit_comes_with_a_setting_that_would() -> None:
    small = Gpu("NVIDIA A100", (8, 0), 40 * GIB, 39 * GIB, 0)
    found = check_fit(ONE, host(4, gpu=small), large())
    assert (found.status, found.advice) == ("fail", "MIZZEN_TENSOR_PARALLEL_SIZE=4 would fit")
    tight = configured(device="cuda", max_model_len=40_960, kv_cache_bytes=GIB)
    found = check_fit(tight, host(1), large())
    assert (found.status, found.advice) == ("fail", "MIZZEN_MAX_MODEL_LEN=4096 would fit")
    found = check_fit(ONE, host(1, gpu=small), large(128))
    assert (found.status, found.advice) == ("fail", "take a smaller model, or give it about 143.5 GiB a GPU")
    whole = Gpu("of that size", (9, 0), 144 * GIB, 144 * GIB, 0)
    assert check_fit(ONE, host(1, gpu=whole), large(128)).status == "ok"


def test_the_cpu_has_to_hold_float32(smollm2: Path) -> None:
    arch = parse_architecture(smollm2)
    assert check_fit(CPU, host(), arch).status == "ok"
    found = check_fit(CPU, host(memory_free_bytes=GIB), arch)
    assert (found.status, found.advice) == ("fail", "take a smaller model, or give it about 1.8 GiB of free memory")
    assert check_fit(CPU, host(memory_free_bytes=int(1.9 * GIB)), arch).status == "ok"


# ---- reading the host ----


class FakeNvml:
    """Two GPUs, as pynvml shows them."""

    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 0, 2, 0

    def __init__(self, linked_by: int | None) -> None:
        self._linked_by = linked_by

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13_010

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=100, free=90 - handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[int]:
        return [1] * handle

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, capability: int) -> int:
        return self.NVML_P2P_STATUS_OK if capability == self._linked_by else 5


@pytest.mark.parametrize(("linked_by", "link"), [(2, "NVLink"), (0, "PCIe"), (None, "none")])
def test_the_driver_is_read_through_nvml(linked_by: int | None, link: str) -> None:
    driver = read_driver(FakeNvml(linked_by))
    assert (driver.version, driver.cuda, driver.links) == ("580.95", (13, 1), {(0, 1): link})
    assert driver.gpus[1] == Gpu("GPU 1", (9, 0), 100, 89, 1)


def test_without_nvml_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert facts.gather_driver() == (None, "the package nvidia-ml-py is not installed")

    class Broken:
        NVMLError = RuntimeError

        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", Broken())  # type: ignore[arg-type]
    assert facts.gather_driver() == (None, "NVML: Driver Not Loaded")


# ---- the command ----


def test_all_checks_run_on_this_host(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_checks(configured(model=str(smollm2), port=18_431, health_port=18_432), host())
    names = [check.name for check in found]
    assert len(names) == len(set(names)) >= 18
    assert {check.status for check in found} <= {"ok", "skip", "warn"}


def test_the_command_prints_json_and_ends_with_0(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--model", str(smollm2), "--port", "18431", "--health-port", "18432", "--device", "cpu"]
    assert main(["--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert {check["name"] for check in report["checks"]} >= {"settings", "torch", "model", "fit", "keys"}


def test_a_failure_ends_with_1_and_its_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--model", str(tmp_path / "none"), "--port", "18431", "--health-port", "18432"]) == 1
    lines = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert lines[at].split()[1] == "model"
    assert lines[at + 1].split()[0] == "->"
    assert lines[-1].startswith("1 failed")


def test_wrong_settings_end_with_78_and_a_missing_gpu_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found, code = diagnose({"model": "m", "page_size": "0"})
    assert ([check.name for check in found], code) == (["settings"], 78)
    monkeypatch.setattr("mizzen.doctor.main.gather", lambda environment: host())
    found, code = diagnose({"model": "m", "device": "cuda"})
    assert ([check.name for check in found], code) == (["settings", "driver"], 78)
    assert "no usable GPU" in found[0].detail
    assert "Driver Not Loaded" in found[1].detail


def test_the_table_and_the_json_say_the_same() -> None:
    found = [Check("a", "ok", "fine"), Check("bb", "warn", "odd", "mend it"), Check("c", "skip", "no")]
    table = as_table(found).splitlines()
    assert [line.split() for line in table[:3]] == [["ok", "a", "fine"], ["WARN", "bb", "odd"], ["->", "mend", "it"]]
    assert table[-1] == "nothing failed, 1 to look at"
    assert json.loads(as_json(found))["ok"]


def test_memory_that_a_running_server_takes_does_not_count(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        settings = configured(model=str(smollm2), port=18_431, health_port=server.getsockname()[1])
        phases: list[str | None] = [None, "serve"]  # a probe each: one a run
        monkeypatch.setattr("mizzen.doctor.main.running_phase", lambda host, port: phases.pop(0))
        for status in ("fail", "ok"):
            checked = run_checks(settings, host(memory_free_bytes=2**20))
            assert [check.status for check in checked if check.name == "fit"] == [status]
        assert not phases
