"""What the service is made of: each process's module, the group that lives and dies with it, and when it starts."""

import sys
from dataclasses import dataclass
from typing import Literal

from mizzen.config.config import Config

Kind = Literal["api", "prepare", "metrics", "tokenizer", "detokenizer", "engine"]
FIRST: tuple[Kind, ...] = ("api", "prepare", "metrics")  # started at once; the others when the model is known


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. Those of one ``group`` are restarted together. ``fds`` are inherited."""

    name: str
    kind: Kind
    group: str
    command: tuple[str, ...]  # what --run-dir, --name and --parent are added to
    fds: tuple[int, ...] = ()


def service_specs(config: Config, api_fd: int) -> tuple[ProcessSpec, ...]:
    """The processes of the real service. ``api_fd`` is the listening socket that all api workers share."""
    specs = [
        _spec("api", f"api-{i}", "mizzen.server.main", "--fd", str(api_fd), fds=(api_fd,))
        for i in range(config.server.api_workers)
    ]
    specs.append(_spec("prepare", "prepare", "mizzen.models.prepare"))
    if config.metrics.enabled:
        specs.append(_spec("metrics", "metrics", "mizzen.observability.metrics_worker"))
    specs += [
        _spec("tokenizer", f"tokenizer-{i}", "mizzen.tokenizer.tokenize_worker")
        for i in range(config.tokenizer_workers)
    ]
    specs.append(_spec("detokenizer", "detokenizer", "mizzen.tokenizer.detokenize_worker"))
    specs += [
        _spec("engine", f"engine-{rank}", "mizzen.engine.process", group="engine")
        for rank in range(config.engine.tensor_parallel_size)
    ]
    return tuple(specs)


def _spec(
    kind: Kind, name: str, module: str, *args: str, fds: tuple[int, ...] = (), group: str | None = None
) -> ProcessSpec:
    return ProcessSpec(name, kind, group or name, (sys.executable, "-m", module, *args), fds)
