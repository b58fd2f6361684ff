"""The CPU example's pod, run by Docker as Helm rendered it: it downloads, starts, passes its probes, serves, drains.

No cluster is here: ``docker_pod`` gives the containers what the spec says, and does what a kubelet does with them.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import chart
import httpx
import pytest
import yaml
from docker_pod import Kubelet, Pod, Spec

from containers.conftest import image as image  # the fixture
from containers.docker_host import docker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first builds the image

MODEL = yaml.safe_load((chart.CHART / "examples" / "cpu.yaml").read_text())["config"]["model"]
KEY = "sk-of-the-pod"
HUB_PORT = 9000
WEIGHTS = "model.safetensors"
# A hub within the pod's network that has the model's files. It prints what is fetched, and is slow with weights.
HUB = """
import http.server, json, pathlib, shutil, sys, time
model, folder = sys.argv[1], pathlib.Path("/model")
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        files = {file.name: file.stat().st_size for file in folder.iterdir()}
        headers, body = {"Content-Type": "application/json"}, b"{}"
        if path.startswith(f"/api/models/{model}/tree/"):
            body = json.dumps([{"type": "file", "path": f, "size": n, "oid": f} for f, n in files.items()]).encode()
        elif path.startswith(f"/api/models/{model}"):
            body = json.dumps({"id": model, "sha": "a" * 40, "siblings": [{"rfilename": f} for f in files]}).encode()
        elif path.startswith(f"/{model}/resolve/") and path.rpartition("/")[2] in files:
            name = path.rpartition("/")[2]
            headers, body = {"ETag": f'"{name}"', "X-Repo-Commit": "a" * 40}, folder / name
        else:
            self.send_response(404)
            headers["X-Error-Code"] = "RepoNotFound"
        if not hasattr(self, "_headers_buffer"):
            self.send_response(200)
        size = len(body) if isinstance(body, bytes) else body.stat().st_size
        for key, value in ({"Content-Length": str(size)} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET" and isinstance(body, bytes):
            self.wfile.write(body)
        elif self.command == "GET":
            print("fetched", body.name, flush=True)
            with body.open("rb") as file:
                if body.suffix == ".safetensors":
                    self.wfile.write(file.read(2**20))
                    time.sleep(4.0)
                shutil.copyfileobj(file, self.wfile, 2**20)
    do_HEAD = do_GET
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Hub).serve_forever()
"""


class Release:
    """The CPU example as rendered, on a network without a way out."""

    def __init__(self, built: str, folder: Path, stack: ExitStack, version: str, *arguments: str) -> None:
        repository, _, tag = built.rpartition(":")
        mirror = json.dumps([{"name": "HF_ENDPOINT", "value": f"http://127.0.0.1:{HUB_PORT}"}])
        # The Service's port is the pod's own, for nothing here translates ports.
        given = (
            *("--set", f"image.repository={repository},image.tag={tag},service.port=8000"),
            *("--set-json", f"extraEnv={mirror}"),
        )
        example = ("-f", str(chart.CHART / "examples" / "cpu.yaml"))
        self.objects = chart.template(*example, *given, *arguments, version=version)
        self.secrets = {
            item["metadata"]["name"]: item["stringData"] for item in self.objects if item["kind"] == "Secret"
        }
        self.image, self._folder, self._stack = built, folder, stack
        self._network = f"mizzen-{uuid.uuid4().hex[:8]}"
        docker("network", "create", "--internal", self._network)
        stack.callback(docker, "network", "rm", self._network, check=False)
        self.pod = self.make(chart.pod(self.objects), "llm-mizzen")
        self.container = chart.server(self.objects)

    def make(self, spec: Spec, name: str) -> Pod:
        where: Any = {"image": self.image, "network": self._network, "folder": self._folder, "secrets": self.secrets}
        pod = Pod(spec, name=name, **where)
        self._stack.callback(pod.remove)
        return pod

    def hub(self, model: Path) -> Callable[[], list[str]]:
        """A hub that has the model; what has been fetched from it so far."""
        mount = f"--volume={model}:/model:ro"
        hub = self.pod.beside(mount, "--entrypoint=python3", self.image, "-c", HUB, MODEL, str(HUB_PORT), name="hub")
        return lambda: [line.removeprefix("fetched ") for line in docker("logs", hub).stdout.splitlines()]

    def download(self, model: Path) -> None:
        """The init container, as often as a pod may come back: with the hub, and without."""
        container = chart.download(self.objects)
        fetched = self.hub(model)
        done = self.pod.run(container)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(fetched()) == sorted(path.name for path in model.iterdir())
        docker("rm", "--force", f"{self.pod.id}-hub")
        again = self.pod.run(container)
        assert again.returncode == 0, "what is there is used where the hub is down: " + again.stdout + again.stderr

    def start(self) -> Kubelet:
        kubelet = Kubelet(self.container, self.pod, self.pod.start(self.container))
        self._stack.callback(kubelet.close)
        kubelet.start()
        return kubelet

    def body(self, **fields: Any) -> Spec:
        return {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, **fields}

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"} if self.secrets else {}

    def complete(self, tokens: int) -> httpx.Response:
        url = f"http://{self.pod.address}:8000/v1/completions"
        return httpx.post(url, json=self.body(max_tokens=tokens), headers=self.headers(), timeout=120)


class Stream:
    """An answer that is read in a thread of its own."""

    def __init__(self, release: Release, tokens: int) -> None:
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.lines_at_term = 0
        self._url = f"http://{release.pod.address}:8000/v1/completions"
        self._request: Any = {
            "json": release.body(max_tokens=tokens, stream=True),
            "headers": release.headers(),
            "timeout": 120,
        }
        self._pool = ThreadPoolExecutor(1)
        self._read = self._pool.submit(self._run)
        assert self.begun.wait(60)

    def _run(self) -> None:
        with httpx.stream("POST", self._url, **self._request) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                    self.begun.set()

    def finish(self) -> list[str]:
        self._read.result(120)
        self._pool.shutdown()
        return self.lines


Install = Callable[..., Release]


@pytest.fixture
def install(image: str, tmp_path: Path) -> Iterator[Install]:
    with ExitStack() as stack:
        yield lambda version, *arguments: Release(image, tmp_path, stack, version, *arguments)


def reason(lines: list[str]) -> str:
    """Why a stream ended; empty where its end is missing."""
    if lines[-1] != "data: [DONE]":
        return ""
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return next((choice["finish_reason"] for chunk in chunks[::-1] for choice in chunk["choices"]), "")


@pytest.mark.parametrize(
    ("version", "arguments"),
    [("1.28.0", ()), ("1.35.0", ("--set", f"apiKeys.keys={{{KEY}}}"))],
    ids=["our-own-sleep", "native-sleep-and-keys"],
)
def test_it_downloads_starts_serves_and_drains_as_rendered(
    install: Install, smollm2: Path, version: str, arguments: tuple[str, ...]
) -> None:
    release = install(version, *arguments)
    release.download(smollm2)
    kubelet = release.start()
    kubelet.wait_ready()
    status = docker("exec", kubelet.name, "cat", "/proc/1/status").stdout
    held = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
    assert held["Uid"] == ["10001"] * 4
    assert held["CapEff"] == held["CapBnd"] == ["0" * 16]
    assert (held["NoNewPrivs"], held["Seccomp"]) == (["1"], ["2"])
    assert docker("exec", kubelet.name, "touch", "/opt/mizzen/x", check=False).returncode != 0, "the root is read-only"

    began = time.monotonic()
    assert release.complete(32).status_code == 200
    tokens_per_s = 32 / (time.monotonic() - began)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(release.complete, [32] * 8))
    assert [answer.status_code for answer in answers] == [200] * 8

    # `helm test`: its pods in their order, each in a pod of its own.
    tests = [item for item in release.objects if item["kind"] == "Pod"]
    tests.sort(key=lambda item: int(item["metadata"]["annotations"]["helm.sh/hook-weight"]))
    assert len(tests) == 5
    for item in tests:
        client = release.make(item["spec"], item["metadata"]["name"])
        done = client.run(item["spec"]["containers"][0])
        assert done.returncode == 0, done.stdout + done.stderr
        client.remove()
    assert kubelet.killed is None
    assert kubelet.answers["liveness"]
    assert all(kubelet.answers["liveness"])
    first = kubelet.answers["readiness"].index(True)
    assert all(kubelet.answers["readiness"][first:])

    # The pod is deleted while an answer streams; another begins while the hook sleeps. Neither is near to the drain's
    # end, even where the machine is several times slower by then.
    streams = [Stream(release, int(5 * tokens_per_s))]

    def last_moment() -> None:
        assert kubelet.ready, "nobody is told before SIGTERM: what still comes is served"
        streams.append(Stream(release, int(3 * tokens_per_s) + 16))
        streams[-1].lines_at_term = len(streams[-1].lines)

    assert kubelet.delete(last_moment) == 0
    assert [reason(stream.finish()) for stream in streams] == ["length", "length"]
    assert len(streams[-1].lines) > streams[-1].lines_at_term + 2, "it went on after SIGTERM"
    assert kubelet.killed is None
    assert release.pod.termination_message("mizzen") == ""


def test_a_hang_fails_the_probes_and_an_answer_longer_than_the_drain_is_cut_before_the_pod_is_killed(
    install: Install, smollm2: Path
) -> None:
    release = install("1.35.0", "--set", "config.drain_timeout_s=2,preStopSeconds=1")
    assert release.pod.grace_s == 1 + 2 + 15
    release.download(smollm2)
    kubelet = release.start()
    kubelet.wait_ready()

    docker("pause", kubelet.name)
    probe = release.container["livenessProbe"]
    deadline = time.monotonic() + (probe["failureThreshold"] + 2) * (probe["periodSeconds"] + probe["timeoutSeconds"])
    while kubelet.killed is None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert kubelet.killed.startswith("liveness")
    assert not kubelet.ready
    docker("unpause", kubelet.name)
    kubelet.killed = None
    kubelet.wait_ready()

    stream = Stream(release, 4000)
    assert kubelet.delete() == 0
    assert reason(stream.finish()) != "length"
    assert "error" in "".join(stream.lines[-2:])


def test_a_pod_that_cannot_reach_its_hub_says_so_where_kubectl_shows_it(install: Install) -> None:
    release = install("1.35.0")
    done = release.pod.run(chart.download(release.objects))
    assert done.returncode != 0
    assert "the hub cannot be reached" in release.pod.termination_message("download").splitlines()[-1]


def test_a_download_that_was_killed_begins_again_with_what_is_missing(install: Install, smollm2: Path) -> None:
    release = install("1.35.0")
    container = chart.download(release.objects)
    fetched = release.hub(smollm2)
    every = {path.name for path in smollm2.iterdir()}
    name = release.pod.start(container)
    deadline = time.monotonic() + 60
    while set(fetched()) != every:
        assert time.monotonic() < deadline, release.pod.logs(name)
        time.sleep(0.1)
    time.sleep(1.0)  # what is small comes whole; the hub takes longer over the weights
    docker("kill", name)
    done = release.pod.run(container)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(fetched()) == sorted([*every, WEIGHTS])


def test_two_pods_that_share_a_volume_download_once(install: Install, smollm2: Path) -> None:
    release = install("1.35.0")
    container = chart.download(release.objects)
    fetched = release.hub(smollm2)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(release.pod.run, [container, container | {"name": "other"}]))
    assert [done.returncode for done in both] == [0, 0], both
    assert fetched().count(WEIGHTS) == 1
