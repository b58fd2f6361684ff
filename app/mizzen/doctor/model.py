"""The checks of the model: whether it is there, can be served, and fits; and with which settings it would."""

import os
import shutil
from pathlib import Path

import msgspec

from mizzen.config.config import Config
from mizzen.doctor.checks import Check, gib
from mizzen.doctor.facts import Facts
from mizzen.doctor.memory import CPU_STEPS_BYTES, ITEM_SIZES, STEPS_BYTES, Fit, fit, num_parameters, token_bytes
from mizzen.errors import ConfigError
from mizzen.models.config import ModelArchitecture, parse_architecture, read_json
from mizzen.models.prepare import prepare_model

USUAL_LEN = 8192  # tokens: a model that has room for less fits poorly
NAMES = (
    "MIZZEN_MODEL is a folder or .gguf file that this user may read (in a container: one that is mounted), "
    "or a name on the hub, such as Qwen/Qwen3-0.6B"
)


def check_model(config: Config) -> tuple[Check, ModelArchitecture | None]:
    """Of a model on the hub only config.json and the tokenizer are fetched, unless HF_HUB_OFFLINE forbids that."""
    source = config.engine.model
    try:
        model = prepare_model(msgspec.structs.replace(source, load_format="dummy"), lambda fraction, detail: None)
        arch = parse_architecture(model.path)
        files = weight_files(Path(model.weights))
    except ConfigError as error:
        return Check("model", "fail", str(error), NAMES), None
    if refused := not_split(arch, config.engine.tensor_parallel_size):
        fewer = range(config.engine.tensor_parallel_size - 1, 0, -1)
        best = next(ranks for ranks in fewer if not not_split(arch, ranks))
        return Check("model", "fail", refused, f"MIZZEN_TENSOR_PARALLEL_SIZE={best} does"), None
    detail = f"{source.model}: {arch.name}, {num_parameters(arch) / 1e9:.2f} billion parameters"
    if source.load_format in ("dummy", "null"):
        return Check("model", "ok", f"{detail}; MIZZEN_LOAD_FORMAT={source.load_format} needs no weights"), arch
    is_local = Path(source.model).expanduser().exists()
    return check_weights(detail, arch, files, may_download=not is_local and not offline()), arch


def check_weights(detail: str, arch: ModelArchitecture, files: list[Path], *, may_download: bool) -> Check:
    """``files``: those that a start reads."""
    absent = [file for file in files if not file.exists()]
    if not absent:
        if locked := [file for file in files if not os.access(file, os.R_OK)]:
            advice = "chmod a+r, or run as a user who may (docker run --user, compose's CONTAINER_USER)"
            return Check("model", "fail", f"{detail}; uid {os.getuid()} may not read {locked[0]}", advice)
        return Check("model", "ok", f"{detail}; its weights are here")
    detail = f"{detail}; its weights are not here ({absent[0].name})"
    if not may_download:
        return Check("model", "fail", detail, f"download them into {absent[0].parent}")
    here = sum(file.stat().st_size for file in files if file.exists())
    wanted = num_parameters(arch) * ITEM_SIZES[arch.dtype] - here
    free = shutil.disk_usage(absent[0].parent).free
    if wanted > free:
        detail = f"{detail}: about {gib(wanted)} to download, and {gib(free)} of disk free"
        return Check("model", "fail", detail, "make room where the hub's files are kept (`cache: models`)")
    return Check("model", "warn", f"{detail}: about {gib(wanted)}", "the first start downloads them")


def weight_files(weights: Path) -> list[Path]:
    """What a start reads of ``weights``, a .gguf file or a folder. Raises ConfigError for an index that is none."""
    if weights.is_file():
        return [weights]
    index = weights / "model.safetensors.index.json"
    if not index.exists():
        return [weights / "model.safetensors"]
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ConfigError(f"'{index}' names no weights", setting="MIZZEN_MODEL")
    return [weights / str(name) for name in sorted(set(named.values()))]


def not_split(arch: ModelArchitecture, ranks: int) -> str:
    """Why so many ranks cannot share it; empty if they can."""
    try:
        arch.check_tensor_parallel(ranks)
    except ConfigError as error:
        return str(error)
    return ""


def offline() -> bool:
    """Whether nothing may be fetched."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def check_fit(config: Config, facts: Facts, arch: ModelArchitecture) -> Check:
    """Guessed, not measured: see ``memory``."""
    ranks = config.engine.tensor_parallel_size
    found = fit_of(config, facts, arch, ranks)
    wanted = min(config.engine.scheduler.max_model_len or min(USUAL_LEN, arch.context_length), arch.context_length)
    kv = f"{gib(found.kv_bytes)} of KV cache"
    detail = f"{gib(found.weights_bytes)} of weights and {kv} a rank, about {found.tokens} tokens"
    if found.tokens >= wanted:
        return Check("fit", "ok", detail)
    advice = _advice(config, facts, arch, found, wanted)
    return Check("fit", "fail", f"{detail}; one request of {wanted} does not fit", advice)


def fit_of(config: Config, facts: Facts, arch: ModelArchitecture, ranks: int) -> Fit:
    engine, cache = config.engine, config.engine.cache
    itemsize = item_size(config, arch)
    if engine.device == "cpu":
        budget = facts.memory_free_bytes // ranks - CPU_STEPS_BYTES
        # as CpuPlatform.kv_budget_bytes has it: half of what weights leave, and no more than a GiB
        spare = max(0, budget - num_parameters(arch, ranks) * itemsize)
        limit = cache.kv_cache_bytes or min(2**30, int(spare * cache.memory_fraction / 2)) // ranks
        return fit(arch, ranks=ranks, itemsize=itemsize, budget_bytes=budget, kv_limit=limit)
    gpus = facts.driver.gpus[:ranks] if facts.driver is not None else ()
    budget = min(
        (int(gpu.total_bytes * cache.memory_fraction) - (gpu.total_bytes - gpu.free_bytes) for gpu in gpus), default=0
    )
    return fit(arch, ranks=ranks, itemsize=itemsize, budget_bytes=budget - STEPS_BYTES, kv_limit=cache.kv_cache_bytes)


def _advice(config: Config, facts: Facts, arch: ModelArchitecture, found: Fit, wanted: int) -> str:
    """The smallest change that makes it fit."""
    if config.engine.device == "cuda" and facts.driver is not None:
        for ranks in range(config.engine.tensor_parallel_size + 1, len(facts.driver.gpus) + 1):
            if not not_split(arch, ranks) and fit_of(config, facts, arch, ranks).tokens >= wanted:
                return f"MIZZEN_TENSOR_PARALLEL_SIZE={ranks} would fit"
    page = config.engine.cache.page_size
    where = " of free memory" if config.engine.device == "cpu" else " a GPU"
    if found.tokens >= 2 * page:
        return f"MIZZEN_MAX_MODEL_LEN={found.tokens // page * page} would fit"
    return f"take a smaller model, or give it about {gib(_needed_bytes(config, arch, found, wanted))}{where}"


def _needed_bytes(config: Config, arch: ModelArchitecture, found: Fit, wanted: int) -> int:
    """Of the host's memory, or of each GPU's, for one request of ``wanted`` tokens: ``fit_of`` backwards."""
    engine, fraction = config.engine, config.engine.cache.memory_fraction
    ranks = engine.tensor_parallel_size
    kv = wanted * token_bytes(arch, ranks, item_size(config, arch))
    if engine.device == "cpu":
        return ranks * (CPU_STEPS_BYTES + found.weights_bytes + int(2 * kv / fraction))
    return int((STEPS_BYTES + found.weights_bytes + kv) / fraction)


def item_size(config: Config, arch: ModelArchitecture) -> int:
    """Bytes of a weight, and of what the KV cache holds."""
    dtype = config.engine.model.dtype
    return ITEM_SIZES[arch.dtype if dtype == "auto" else dtype]
