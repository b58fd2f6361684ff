"""The CPU image for real: locked down as a cluster would, killed, drained, and told wrong things."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from containers.conftest import Start
from containers.docker_host import ANY_UID, HARDENED, REPOSITORY, Container, docker, docker_command
from models.gguf_files import write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first builds the image

CHAT = """
import json, urllib.request
body = {"model": "small", "temperature": 0, "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France?"}]}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""
STREAM = """
import http.client, json
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
body = {"model": "small", "temperature": 0, "max_tokens": 64, "ignore_eos": True, "stream": True, "prompt": "Once"}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
for line in connection.getresponse():
    print(line.decode().strip(), flush=True)
"""
PROCESSES = """
import json, pathlib
found = {}
for path in pathlib.Path("/proc").glob("[0-9]*"):
    words = (path / "cmdline").read_bytes().split(b"\\0")
    state = (path / "stat").read_text().rpartition(")")[2].split()[0]
    found[path.name] = [state, words[words.index(b"--name") + 1].decode() if b"--name" in words else ""]
print(json.dumps(found))
"""
ORPHAN = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.5)  # outlives its parents: PID 1 inherits it
    os._exit(0)
os.wait()
"""

FILL = """
import contextlib
for folder in ("/tmp", "/cache/models", "/cache/compiled"):
    with contextlib.suppress(OSError), open(folder + "/filler", "wb", buffering=0) as file:
        while file.write(bytes(65536)):
            pass
    try:
        with open(folder + "/more", "wb") as file:
            file.write(bytes(65536))
    except OSError as error:
        print(folder, error.strerror)
"""


def processes(container: Container) -> dict[str, tuple[str, str]]:
    """State letter and name of each process, by pid."""
    return {pid: (state, name) for pid, (state, name) in json.loads(container.python(PROCESSES)).items()}


def test_it_serves_locked_down_without_a_network_through_deaths_and_drains(start: Start, smollm2: Path) -> None:
    container = start(*HARDENED, "--network=none", "--memory=2g", "--memory-swap=2g", folder=smollm2)
    container.wait_healthy()
    assert container.python("import os; print(os.getuid(), os.getgid(), sep=':')").strip() == ANY_UID
    assert "Paris" in container.python(CHAT)
    assert "key_compare_in_python" not in container.log(), "the image has its C++ compiled"

    container.python(ORPHAN)
    [engine] = [pid for pid, (_, name) in processes(container).items() if name == "engine-0"]
    container.python(f"import os; os.kill({engine}, 9)")
    container.wait_ready(restarts=1)
    assert "Z" not in {state for state, _ in processes(container).values()}, "PID 1 reaps"
    assert "Paris" in container.python(CHAT)

    command = [docker_command(), "exec", container.name, "python3", "-c", STREAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stream:
        assert stream.stdout is not None
        lines = [stream.stdout.readline()]
        docker("kill", "--signal=TERM", container.name)
        lines += stream.stdout.read().splitlines()
    assert container.wait_exit() == 0
    assert "data: [DONE]" in lines, "the drain lets an answer finish"
    assert not container.state()["OOMKilled"]


def test_what_docker_stop_sends_ends_it_at_once_when_idle(start: Start, smollm2: Path) -> None:
    container = start(*HARDENED, folder=smollm2)
    container.wait_healthy()
    began = time.monotonic()
    docker("stop", "--time", "60", container.name)
    assert time.monotonic() - began < 30.0  # a PID 1 without handlers would take all of the 60 s
    assert container.state()["ExitCode"] == 0


@pytest.mark.parametrize(
    ("options", "settings", "exit_code", "words"),
    [
        ([], {}, 78, "MIZZEN_MODEL is not set"),
        (["--network=none"], {"model": "some/model"}, 78, "the hub cannot be reached"),
        (["--read-only"], {"model": "some/model"}, 78, "needs a tmpfs on /tmp"),
        ([], {"model": "some/model", "device": "cuda"}, 78, "no usable GPU was found"),
    ],
    ids=["no-model", "no-network", "no-tmp", "no-gpu"],
)
def test_it_says_in_one_line_what_it_lacks(
    start: Start, options: list[str], settings: dict[str, str], exit_code: int, words: str
) -> None:
    container = start(*options, **settings)
    assert container.wait_exit() == exit_code
    [line] = [line for line in container.log().splitlines() if "[info" not in line]  # others may still get ready
    assert words in line


def test_a_full_disk_ends_nothing_that_serves_nor_the_restart_of_an_engine(start: Start, smollm2: Path) -> None:
    caches = [f"--tmpfs=/cache/{name}:size=4m,mode=1777" for name in ("models", "compiled")]
    container = start("--read-only", "--tmpfs=/tmp:size=16m", *caches, folder=smollm2)
    container.wait_healthy()
    assert container.python(FILL).count("No space left on device") == 3
    assert "Paris" in container.python(CHAT)
    [engine] = [pid for pid, (_, name) in processes(container).items() if name == "engine-0"]
    container.python(f"import os; os.kill({engine}, 9)")
    container.wait_ready(restarts=1)
    assert "Paris" in container.python(CHAT)
    docker("stop", "--time", "60", container.name)
    assert container.state()["ExitCode"] == 0


def test_a_start_on_a_full_disk_says_in_one_line_where(start: Start, smollm2: Path, tmp_path: Path) -> None:
    container = start("--read-only", "--tmpfs=/tmp:size=4k", folder=smollm2)
    assert container.wait_exit() == 78
    assert "MIZZEN_RUN_DIR: cannot write in /tmp/mizzen-" in container.log()
    assert "Traceback" not in container.log()
    write_gguf(tmp_path / "tiny.gguf")
    tmp_path.chmod(0o755)  # for the container's user
    cache = "--tmpfs=/cache/models:size=4k,mode=1777"
    container = start("--read-only", "--tmpfs=/tmp", cache, "-v", f"{tmp_path}:/gguf:ro", model="/gguf/tiny.gguf")
    assert container.wait_exit() == 78
    [line] = [line for line in container.log().splitlines() if "[info" not in line]
    assert "MIZZEN_CACHE_DIR: '/cache/models/mizzen' cannot be written" in line


def test_too_little_memory_is_named(start: Start, smollm2: Path) -> None:
    container = start("--memory=512m", "--memory-swap=512m", folder=smollm2, max_restarts=1)
    assert container.wait_exit(120.0) == 1
    assert "if memory ran out: raise the limit" in container.log().splitlines()[-1]


def test_the_image_holds_no_compiler_no_pip_and_nothing_writable_but_its_caches(image: str) -> None:
    look = (
        "import json, os, shutil\n"
        "print(json.dumps([name for name in ('gcc', 'g++', 'cc', 'pip', 'pip3', 'curl') if shutil.which(name)]))\n"
        "print(json.dumps([path for path, _, _ in os.walk('/') if not path.startswith(('/proc', '/sys', '/dev')) and "
        "os.access(path, os.W_OK) and not path.startswith(('/tmp', '/var/tmp', '/run/lock'))]))\n"
    )
    done = docker("run", "--rm", f"--user={ANY_UID}", "--entrypoint=python3", image, "-c", look)
    tools, writable = map(json.loads, done.stdout.splitlines())
    assert tools == []
    assert sorted(writable) == ["/cache", "/cache/compiled", "/cache/models"]


def test_labels_and_probes_are_set(image: str) -> None:
    config = json.loads(docker("inspect", "-f", "{{json .Config}}", image).stdout)
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert len(config["Labels"]["org.opencontainers.image.revision"]) == 40
    assert config["StopSignal"] == "SIGTERM"
    assert config["User"] == "10001:0"
    assert config["Entrypoint"] == ["mizzen"]
    assert config["Healthcheck"]["Test"][0] == "CMD"


def test_the_bill_of_materials_has_python_packages_and_debians(image: str) -> None:
    make = ["make", "-s", "sbom", f"SBOM_IMAGE={image}", f"DOCKER={docker_command()}"]
    subprocess.run(make, cwd=REPOSITORY, check=True)
    bill = json.loads((REPOSITORY / "build" / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    urls = [part["purl"] for part in bill["components"]]
    assert len(urls) == len(set(urls)) > 100
    assert {url.partition("@")[0] for url in urls} >= {"pkg:pypi/torch", "pkg:pypi/mizzen", "pkg:deb/debian/libc6"}
    assert not {"pkg:pypi/pip", "pkg:deb/debian/gcc"} & {url.partition("@")[0] for url in urls}


def test_the_doctor_runs_in_the_container(start: Start, smollm2: Path) -> None:
    container = start(*HARDENED, "--network=none", folder=smollm2)
    container.wait_healthy()
    report = json.loads(docker("exec", container.name, "mizzen", "doctor", "--json").stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert report["ok"]
    assert "in phase serve" in found["health port"]["detail"]
    assert {found[name]["status"] for name in ("cache: mizzen", "cache: models", "run folder", "model")} == {"ok"}
    assert found["keys"]["status"] == "warn"
