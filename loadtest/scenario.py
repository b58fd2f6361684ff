"""A scenario says all that a run depends on; what it does not say has one default, and the result repeats it all.

Read from YAML (or JSON), changed by ``--set load.rate=8``. An unknown or wrong field is refused with its path.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from loadtest.arrivals import Closed, Count, Load, Positive

Tokens = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0)]


class ScenarioError(Exception):
    """What the user wrote cannot be run; the message names the field."""


class Range(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Evenly between ``min`` and ``max``; with ``mean`` and ``std`` normal, cut to them."""

    min: Share
    max: Share
    mean: Share | None = None
    std: Share = 0.0


class Synthetic(msgspec.Struct, tag="synthetic", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """Prompts of random words. ``input_tokens``: of the first prompt, its shared prefix included; ``turn_tokens``: of
    each later question of a conversation, which the whole talk so far goes before.

    ``prefixes`` shared beginnings of ``prefix_tokens``; each conversation draws one. ``think_s``: from an answer's end
    to the next question.
    """

    input_tokens: Tokens | Range = 512
    output_tokens: Tokens | Range = 128
    prefixes: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    turns: Tokens | Range = 1
    turn_tokens: Tokens | Range = 64
    think_s: Share | Range = 0.0


class Trace(msgspec.Struct, tag="trace", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """Lengths, times and shared prefixes of a trace. ``skip``: rows left out at the beginning."""

    path: str
    format: Literal["azure", "mooncake", "bailian"]
    skip: Annotated[int, msgspec.Meta(ge=0)] = 0


class ShareGpt(msgspec.Struct, tag="sharegpt", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """Real conversations: a JSON list of {"conversations": [{"from": "human", "value": ...}, ...]}.

    ``max_turns`` questions of each are asked; an answer is as long as the real one, where a tokenizer can tell, and
    at most ``output_tokens``."""

    path: str
    max_turns: Tokens = 1
    output_tokens: Tokens = 256
    think_s: Share | Range = 0.0


class Requests(msgspec.Struct, tag="requests", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """A file of requests: one OpenAI body a line, with ``timestamp`` in seconds where they are to be replayed."""

    path: str


Workload = Synthetic | Trace | ShareGpt | Requests


class Slo(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a good answer keeps, in milliseconds; ``tbt_ms`` holds for every gap of it."""

    ttft_ms: Positive | None = None
    tbt_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Scenario(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One load on one server.

    ``requests``: conversations at most. ``duration_s``: none begins later. ``warmup_s`` and ``warmup_requests``: the
    beginning of the same load, left out of the figures. ``drain_s``: how long the last answers may take after the load
    has ended. ``max_context``: longer prompts with their answers are dropped and counted; by default what /v1/models
    says. ``extra_body`` goes into every body. ``prompt``: "tokens" sends token ids below ``vocabulary``.
    """

    name: str = "unnamed"
    about: str = ""
    endpoint: Literal["chat", "completions"] = "chat"
    prompt: Literal["text", "tokens"] = "text"
    vocabulary: Tokens = 10_000
    workload: Workload = Synthetic()
    load: Load = Closed(concurrency=8)
    requests: Count | None = None
    duration_s: Positive | None = None
    warmup_s: Share = 0.0
    warmup_requests: Annotated[int, msgspec.Meta(ge=0)] = 0
    drain_s: Positive = 120.0
    timeout_s: Positive = 600.0
    max_context: Tokens | None = None
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}
    slo: Slo = Slo()
    seed: int = 0

    def check(self) -> None:
        """Raises ScenarioError."""
        trace = isinstance(self.workload, Trace | Requests)
        if self.requests is None and self.duration_s is None and not trace:
            raise ScenarioError("say how long: requests or duration_s")
        if self.load.__class__.__name__ == "Replay" and not trace:
            raise ScenarioError("load.kind replay needs a workload with times: trace or requests")
        if self.prompt == "tokens" and self.endpoint == "chat":
            raise ScenarioError("prompt tokens needs endpoint completions: a chat is text")
        if isinstance(self.workload, Synthetic) and self.workload.prefix_tokens and not self.workload.prefixes:
            raise ScenarioError("workload.prefix_tokens needs workload.prefixes, the number of them")


def load(path: Path | None, changes: list[str]) -> Scenario:
    """``changes``: "load.rate=8", values as YAML. Raises ScenarioError."""
    data: Any = {}
    if path is not None:
        try:
            data = _yaml(path.read_text(), str(path))
        except OSError as error:
            raise ScenarioError(f"{path}: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ScenarioError(f"{path}: not a mapping")
    for change in changes:
        name, found, value = change.partition("=")
        if not found:
            raise ScenarioError(f"--set {change}: not NAME=VALUE")
        put(data, name, _yaml(value, f"--set {change}"))
    return convert(data)


def _yaml(text: str, where: str) -> Any:
    """JSON is YAML, and does without the package. Raises ScenarioError."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        pass  # YAML, then
    try:
        import yaml  # type: ignore[import-untyped]  # it ships no types
    except ImportError:
        raise ScenarioError(f"{where}: this is YAML, which needs the package pyyaml; JSON does without") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{where}: {' '.join(str(error).split())}") from None


def put(data: dict[str, Any], name: str, value: Any) -> None:
    """Sets a field by its path; another ``kind`` drops the fields of the kind before. Raises ScenarioError."""
    *way, last = name.split(".")
    for step in way:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            raise ScenarioError(f"{name}: {step} has no fields")
    if last == "kind" and data.get("kind") != value:
        data.clear()
    data[last] = value


def convert(data: dict[str, Any]) -> Scenario:
    """Raises ScenarioError."""
    workload = data.get("workload")
    if isinstance(workload, dict) and workload.setdefault("kind", "synthetic") == "trace":
        data.setdefault("load", {"kind": "replay"})
    try:
        scenario = msgspec.convert(data, Scenario)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise ScenarioError(f"{where.strip('`.') or 'scenario'}: {what}") from None
    scenario.check()
    return scenario
