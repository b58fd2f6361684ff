"""GPUs as NVML tells of them; the module is a fake."""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from api_service import make_config
from structlog.testing import capture_logs

from fake_nvml import FakeNvml, NVMLError, NVMLError_NotSupported
from mizzen.ipc.channels import address, configure, encode
from mizzen.ipc.messages import Shutdown
from mizzen.observability.feed import Feed, Samples, query_metrics
from mizzen.observability.gpus import GpuMetrics, gpus_of_ranks, watch_gpus

USED, CAPACITY = "mizzen_gpu_memory_used_bytes", "mizzen_gpu_memory_capacity_bytes"
UTILIZATION = "mizzen_gpu_utilization_ratio"


class Gpus:
    """The GPUs of ``ranks``; ``read`` gives each series' value by name, rank and number."""

    def __init__(self, ranks: int, nvml: FakeNvml, environment: dict[str, str] | None = None) -> None:
        self._sent: list[Samples] = []
        now = iter(range(1000))
        feed = Feed(lambda samples: self._sent.append(samples) is None, clock=lambda: float(next(now)))
        self._gpus = GpuMetrics(feed, ranks, nvml, environment or {})

    def read(self) -> dict[tuple[str, ...], float]:
        self._gpus.read()
        return {(name, *labels): value for name, labels, value in self._sent.pop().gauges}


@pytest.mark.parametrize(
    ("listed", "names"),
    [(None, ["0", "1"]), ("3,1, 2", ["3", "1"]), ("GPU-a", ["GPU-a"]), ("MIG-a,MIG-b", ["MIG-a", "MIG-b"])],
)
def test_ranks_have_the_gpus_that_cuda_shows_in_its_order(listed: str | None, names: list[str]) -> None:
    assert gpus_of_ranks(2, {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == names


def test_each_rank_s_gpu_has_its_memory_and_utilization() -> None:
    assert Gpus(2, FakeNvml(), {"CUDA_VISIBLE_DEVICES": "GPU-1,0"}).read() == {
        (USED, "0", "1"): 2 * 2**30,
        (CAPACITY, "0", "1"): 4 * 2**30,
        (UTILIZATION, "0", "1"): 0.75,
        (USED, "1", "0"): 2**30,
        (CAPACITY, "1", "0"): 4 * 2**30,
        (UTILIZATION, "1", "0"): 0.75,
    }


def test_gpus_of_no_rank_are_not_told() -> None:
    assert {rank for _, rank, _ in Gpus(1, FakeNvml()).read()} == {"0"}


def test_what_a_gpu_does_not_support_has_no_series_and_is_no_fault() -> None:
    nvml = FakeNvml()
    nvml.gpus[0].utilization_error = nvml.gpus[1].memory_error = NVMLError_NotSupported()
    with capture_logs() as logs:
        assert set(Gpus(2, nvml).read()) == {(USED, "0", "0"), (CAPACITY, "0", "0"), (UTILIZATION, "1", "1")}
    assert logs == []


def test_a_lost_gpu_is_nan_and_one_line_until_it_is_back() -> None:
    nvml = FakeNvml()
    gpus = Gpus(2, nvml)
    healthy = gpus.read()
    nvml.gpus[0].memory_error = NVMLError("GPU is lost")
    with capture_logs() as logs:
        lost = [gpus.read(), gpus.read()]
    for values in lost:
        assert set(values) == set(healthy)
        assert {rank for (_, rank, _), value in values.items() if math.isnan(value)} == {"0"}
        assert all(values[series] == value for series, value in healthy.items() if series[1] == "1")
    assert [(line["log_level"], line["rank"], line["reason"]) for line in logs] == [("warning", "0", "GPU is lost")]
    nvml.gpus[0].memory_error = None
    assert gpus.read() == healthy


@pytest.mark.parametrize(
    "nvml",
    [None, FakeNvml(NVMLError("Driver Not Loaded")), FakeNvml()],
    ids=["no package", "no driver", "fewer GPUs than ranks"],
)
def test_without_nvml_there_is_one_line_and_no_series(nvml: FakeNvml | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sent: list[Samples] = []
    with capture_logs() as logs:
        watch_gpus(Feed(lambda samples: sent.append(samples) is None), ranks=3)
    assert [line["log_level"] for line in logs] == ["info"]
    assert logs[0]["event"].startswith("no metrics of GPUs")
    assert sent == []


# ---- the metrics process ----


@contextlib.contextmanager
def metrics_process(folder: Path, device: str) -> Iterator[Callable[[str], list[str]]]:
    """A real one with a fake NVML, and this process as its supervisor; gives what asks it for lines of its text."""
    run_dir, modules = folder / "r", folder / "modules"
    run_dir.mkdir()
    modules.mkdir()
    (modules / "pynvml.py").write_text("import sys, fake_nvml\nsys.modules[__name__] = fake_nvml.FakeNvml()\n")
    config = make_config()
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, device=device))
    (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
    context: Any = zmq.Context()
    supervisor = context.socket(zmq.ROUTER)
    configure(supervisor)
    supervisor.bind(address(run_dir, "control"))
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = f"{modules}:{Path(__file__).parents[1]}"
    options = ["--run-dir", str(run_dir), "--name", "metrics", "--parent", str(os.getpid())]
    command = [sys.executable, "-m", "mizzen.observability.metrics_worker", *options]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def lines(prefix: str) -> list[str]:
        text = query_metrics(context, run_dir, 20.0)
        assert text is not None
        return sorted(line for line in text.decode().splitlines() if line.startswith(prefix))

    try:
        assert lines("mizzen_build_info")
        yield lines
        supervisor.send_multipart([b"metrics", encode(Shutdown())])
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        context.destroy(linger=0)


def test_the_metrics_process_tells_of_an_engine_s_gpu(tmp_path: Path) -> None:
    with metrics_process(tmp_path, "cuda") as lines:
        until_s = time.monotonic() + 10
        while not lines("mizzen_gpu_"):
            assert time.monotonic() < until_s
        labels = '{engine="0",gpu="0",model_name="tiny",rank="0"}'
        assert lines("mizzen_gpu_") == [
            f"mizzen_gpu_memory_capacity_bytes{labels} 4.294967296e+09",
            f"mizzen_gpu_memory_used_bytes{labels} 1.073741824e+09",
            f"mizzen_gpu_utilization_ratio{labels} 0.75",
        ]


def test_nvml_is_not_asked_where_the_engine_runs_on_the_cpu(tmp_path: Path) -> None:
    with metrics_process(tmp_path, "cpu") as lines:
        time.sleep(0.5)
        assert lines("mizzen_gpu_") == []
