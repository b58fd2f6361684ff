"""A pod that Helm rendered, as `docker run`s: what its spec says of a container reaches Docker, or is refused here.

A holder has the pod's network and volumes, as a pod's sandbox has: what an init container left is there for the
server. ``Kubelet`` probes a container by its own schedule, and ends it as a node does when the pod is deleted.
"""

import http.client
import json
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from containers.docker_host import Done, docker, docker_command

Spec = dict[str, Any]

# Where and when a pod runs, and by whose leave: not how.
PLACEMENT = {"serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "restartPolicy"}
PLACEMENT |= {"nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "imagePullSecrets"}
# Kubernetes gives each container this file, and shows what it holds when the container has ended.
TERMINATION_LOG = "/dev/termination-log"
HOLD = "import signal; signal.pause()"
FILL = """
import json, os, sys
files, mode, gid = json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
for name, text in files.items():
    path = os.path.join(sys.argv[1], name)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)
    os.chown(path, 0, gid)
"""


def quantity(text: Any) -> float:
    """Bytes of 4Gi, cores of 100m."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


class Pod:
    """``secrets`` are those of the namespace, by name and key."""

    def __init__(self, spec: Spec, *, image: str, network: str, folder: Path, name: str, secrets: Spec) -> None:
        self.id = f"mizzen-pod-{uuid.uuid4().hex[:8]}"
        self.network, self.name = network, name
        self._image, self._secrets = image, secrets
        self._log = folder / f"{self.id}-termination-log"
        self.grace_s = int(spec.get("terminationGracePeriodSeconds", 30))
        known = {"containers", "initContainers", "volumes", "securityContext", "terminationGracePeriodSeconds"}
        assert set(spec) <= known | PLACEMENT, "a field that nothing here translates"
        self._spec = spec
        held = dict(spec["securityContext"])
        assert held.pop("runAsNonRoot") is True
        assert held.pop("seccompProfile") == {"type": "RuntimeDefault"}  # which Docker applies unless told otherwise
        del held["fsGroupChangePolicy"]  # new volumes have the group from the start
        self._uid, self._gid, self._group = held.pop("runAsUser"), held.pop("runAsGroup"), held.pop("fsGroup")
        assert held == {}
        assert self._uid > 0
        self._names: list[str] = [self.id]
        self._volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in self._volumes.values():
            self._make(volume)
        mounts = [f"--mount=type=volume,source={self.id}-{name},target=/volumes/{name}" for name in self._volumes]
        alias = ["--network", network, "--network-alias", name]
        docker("run", "-d", "--name", self.id, "--user=0", *alias, *mounts, "--entrypoint=python3", image, "-c", HOLD)
        for volume in self._volumes.values():
            if "secret" in volume:
                self._fill(volume["name"], volume["secret"])

    @property
    def address(self) -> str:
        return docker(
            "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", self.id
        ).stdout.strip()

    def _make(self, volume: Spec) -> None:
        """Of its size, writable by the pod's group, whatever of it a node would have on disk or in memory."""
        (kind,) = set(volume) - {"name"}
        assert kind in ("emptyDir", "secret"), f"a volume that nothing here translates: {kind}"
        size = int(quantity(volume[kind].get("sizeLimit", "1Mi")))
        options = f"o=size={size},mode=2777,gid={self._group}"
        local = ["--driver=local", "--opt=type=tmpfs", "--opt=device=tmpfs", f"--opt={options}"]
        docker("volume", "create", *local, f"{self.id}-{volume['name']}")

    def _fill(self, name: str, secret: Spec) -> None:
        files, mode = json.dumps(self._secrets[secret["secretName"]]), str(secret["defaultMode"])
        docker("exec", self.id, "python3", "-c", FILL, f"/volumes/{name}", files, mode, str(self._group))

    # ---- containers ----

    def _environment(self, container: Spec) -> list[str]:
        given = []
        for entry in container.get("env", []):
            if "valueFrom" in entry:
                asked = entry["valueFrom"]["secretKeyRef"]
                given.append(f"--env={entry['name']}={self._secrets[asked['name']][asked['key']]}")
            else:
                given.append(f"--env={entry['name']}={entry['value']}")
        return given

    def _security(self, container: Spec) -> list[str]:
        held = dict(container["securityContext"])
        assert held.pop("privileged") is False
        options = [f"--user={self._uid}:{self._gid}", f"--group-add={self._group}"]
        if held.pop("allowPrivilegeEscalation") is False:
            options.append("--security-opt=no-new-privileges")
        if held.pop("readOnlyRootFilesystem"):
            options.append("--read-only")
        capabilities = held.pop("capabilities")
        assert set(capabilities) == {"drop"}
        options += [f"--cap-drop={name}" for name in capabilities["drop"]]
        assert held == {}, "a field that nothing here translates"
        return options

    def _resources(self, container: Spec) -> list[str]:
        limits, requests = container["resources"].get("limits", {}), container["resources"].get("requests", {})
        assert set(limits) <= {"memory", "cpu"}, "no GPU here"
        options = [f"--cpu-shares={max(2, int(1024 * quantity(requests.get('cpu', 0))))}"]
        if "memory" in limits:  # a node has no swap
            memory = int(quantity(limits["memory"]))
            options += [f"--memory={memory}", f"--memory-swap={memory}"]
        if "cpu" in limits:
            options.append(f"--cpus={quantity(limits['cpu'])}")
        return options

    def _mounts(self, container: Spec) -> list[str]:
        self._log.write_text("")
        self._log.chmod(0o666)
        options = [f"--volume={self._log}:{TERMINATION_LOG}"]
        for mount in container.get("volumeMounts", []):
            assert set(mount) <= {"name", "mountPath", "readOnly"}
            assert mount["name"] in self._volumes
            # nocopy: what the image has at that place is hidden, as on a node
            text = f"type=volume,source={self.id}-{mount['name']},target={mount['mountPath']},volume-nocopy"
            options.append(f"--mount={text}{',readonly' if mount.get('readOnly') else ''}")
        return options

    def _options(self, container: Spec) -> list[str]:
        known = {"name", "image", "imagePullPolicy", "command", "args", "env", "ports", "resources", "volumeMounts"}
        known |= {"securityContext", "terminationMessagePolicy", "lifecycle"}
        known |= {"startupProbe", "readinessProbe", "livenessProbe"}
        assert set(container) <= known, "a field that nothing here translates"
        name = f"{self.id}-{container['name']}"
        self._names.append(name)
        docker("rm", "--force", "--volumes", name, check=False)
        options = ["--name", name, f"--network=container:{self.id}", *self._security(container)]
        options += [*self._resources(container), *self._mounts(container), *self._environment(container)]
        command = container.get("command", [])
        entry = [f"--entrypoint={command[0]}"] if command else []
        return [*options, *entry, self._image, *command[1:], *container.get("args", [])]

    def run(self, container: Spec, timeout_s: float = 300.0) -> Done:
        """To its end, whatever that is."""
        return docker("run", *self._options(container), check=False, timeout_s=timeout_s)

    def start(self, container: Spec) -> str:
        """Its name for Docker."""
        docker("run", "-d", *self._options(container))
        return f"{self.id}-{container['name']}"

    def beside(self, *options: str, name: str) -> str:
        """Another container in the pod's network, of the image, as root."""
        self._names.append(f"{self.id}-{name}")
        docker("run", "-d", "--name", self._names[-1], f"--network=container:{self.id}", "--user=0", *options)
        return self._names[-1]

    def termination_message(self, name: str) -> str:
        """Of a container that ended: what it left in its file, or its last lines if it failed without a word."""
        failed = docker("inspect", "-f", "{{.State.ExitCode}}", f"{self.id}-{name}").stdout.strip() != "0"
        return self._log.read_text() or (self.logs(f"{self.id}-{name}") if failed else "")

    def logs(self, name: str) -> str:
        done = docker("logs", "--tail=80", name)
        return done.stdout + done.stderr

    def remove(self) -> None:
        for name in reversed(self._names):
            docker("rm", "--force", "--volumes", name, check=False)
        for name in self._volumes:
            docker("volume", "rm", "--force", f"{self.id}-{name}", check=False)


class Kubelet:
    """Probes a container from outside, on the schedule that its spec has, from ``start`` to ``close``.

    ``killed`` says why a node would have restarted it by now. ``ready`` is what an endpoint would say.
    """

    def __init__(self, container: Spec, pod: Pod, name: str) -> None:
        self.killed: str | None = None
        self.ready = False
        self.answers: dict[str, list[bool]] = {"startup": [], "readiness": [], "liveness": []}
        self._container, self._pod, self.name = container, pod, name
        self._address = pod.address
        self._ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        self._over, self._started = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._probe, args=(kind,), daemon=True) for kind in self.answers]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        self._started.set()
        for thread in self._threads:
            thread.join()

    def ask(self, kind: str) -> tuple[bool, str]:
        probe = self._container[f"{kind}Probe"]
        where = probe["httpGet"]
        connection = http.client.HTTPConnection(
            self._address, self._ports[where["port"]], timeout=probe["timeoutSeconds"]
        )
        try:
            connection.request("GET", where["path"])
            answer = connection.getresponse()
            return 200 <= answer.status < 400, f"{answer.status} {answer.read(500)!r}"
        except (OSError, http.client.HTTPException) as error:
            return False, repr(error)
        finally:
            connection.close()

    def _probe(self, kind: str) -> None:
        probe = self._container[f"{kind}Probe"]
        assert set(probe) == {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"}
        if kind != "startup":
            self._started.wait()
        failures = 0
        while not self._over.wait(probe["periodSeconds"]):
            good, said = self.ask(kind)
            self.answers[kind].append(good)
            failures = 0 if good else failures + 1
            if kind == "readiness":
                self.ready = good or (self.ready and failures < probe["failureThreshold"])
            elif failures >= probe["failureThreshold"]:
                self.killed = f"{kind}: {said}"
            elif kind == "startup" and good:
                self._started.set()
                return

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.ready:
            assert self.killed is None, self.killed
            assert self.running(), self._pod.logs(self.name)
            assert time.monotonic() < deadline, self._pod.logs(self.name)
            time.sleep(0.2)

    def running(self) -> bool:
        return docker("inspect", "-f", "{{.State.Running}}", self.name).stdout.strip() == "true"

    def delete(self, before_term: Callable[[], None] = lambda: None) -> int:
        """The preStop hook, SIGTERM, and SIGKILL when the pod's grace period is over: the exit code, 137 then.

        ``before_term`` is called when the hook has ended; what it takes counts, too.
        """
        deadline = time.monotonic() + self._pod.grace_s
        hook = self._container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        if "sleep" in hook:
            time.sleep(hook["sleep"]["seconds"])
        else:
            docker("exec", self.name, *hook["exec"]["command"], timeout_s=self._pod.grace_s)
        before_term()
        docker("kill", "--signal=TERM", self.name)
        try:
            left = max(2.0, deadline - time.monotonic())
            wait = [docker_command(), "wait", self.name]
            return int(subprocess.run(wait, capture_output=True, text=True, timeout=left, check=True).stdout)
        except subprocess.TimeoutExpired:
            docker("kill", "--signal=KILL", self.name)
            return int(docker("wait", self.name).stdout)
