"""The checks of the model: whether it is there, can be served, and fits; and with which settings it would."""

from pathlib import Path

import msgspec

from mizzen.config.config import Config
from mizzen.doctor.checks import Check, gib
from mizzen.doctor.facts import Facts
from mizzen.doctor.memory import CPU_STEPS_BYTES, ITEM_SIZES, STEPS_BYTES, Fit, fit, num_parameters
from mizzen.errors import ConfigError
from mizzen.models.config import ModelArchitecture, parse_architecture
from mizzen.models.prepare import prepare_model

USUAL_LEN = 8192  # tokens: a model that has room for less fits poorly


def check_model(config: Config) -> tuple[Check, ModelArchitecture | None]:
    """Of a model on the hub only config.json and the tokenizer are fetched, unless HF_HUB_OFFLINE forbids that."""
    source = config.engine.model
    try:
        model = prepare_model(msgspec.structs.replace(source, load_format="dummy"), lambda fraction, detail: None)
        arch = parse_architecture(model.path)
    except ConfigError as error:
        return Check("model", "fail", str(error), "README.md says what MIZZEN_MODEL may be"), None
    if refused := not_split(arch, config.engine.tensor_parallel_size):
        fewer = range(config.engine.tensor_parallel_size - 1, 0, -1)
        best = next(ranks for ranks in fewer if not not_split(arch, ranks))
        return Check("model", "fail", refused, f"MIZZEN_TENSOR_PARALLEL_SIZE={best} does"), None
    detail = f"{source.model}: {arch.name}, {num_parameters(arch) / 1e9:.2f} billion parameters"
    if source.load_format in ("dummy", "null"):
        return Check("model", "ok", f"{detail}; MIZZEN_LOAD_FORMAT={source.load_format} needs no weights"), arch
    if has_weights(Path(model.weights)):
        return Check("model", "ok", f"{detail}; its weights are here"), arch
    if Path(source.model).expanduser().exists() or offline():
        return Check("model", "fail", f"{detail}; its weights are not here", "download them into that folder"), arch
    return Check("model", "warn", f"{detail}; its weights are not here", "the first start downloads them"), arch


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


def has_weights(path: Path) -> bool:
    return path.is_file() or any(path.glob("model*.safetensors"))


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
    itemsize = ITEM_SIZES[arch.dtype if engine.model.dtype == "auto" else engine.model.dtype]
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
    if found.tokens >= 2 * page:
        return f"MIZZEN_MAX_MODEL_LEN={found.tokens // page * page} would fit"
    return "take a smaller model, or give it more memory"
