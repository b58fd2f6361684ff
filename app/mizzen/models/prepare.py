"""The download phase: whatever MIZZEN_MODEL names becomes a local folder that every process reads.

What is wrong with the model is found out here where it can be, before weights are loaded.
"""

import re
from pathlib import Path

from mizzen.config.config import ModelConfigSource
from mizzen.errors import ConfigError
from mizzen.hub import download
from mizzen.ipc.messages import ModelInfo, Shutdown
from mizzen.ipc.process import child_process
from mizzen.models.config import Progress, default_sampling, eos_token_ids, parse_architecture
from mizzen.models.gguf_folder import convert_gguf, gguf_folder

__all__ = ["convert_gguf", "main", "prepare_model"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def prepare_model(source: ModelConfigSource, progress: Progress) -> ModelInfo:
    """Raises ConfigError, in one line, if the model cannot be found, downloaded or served."""
    folder, weights = _locate(source, progress)
    arch = parse_architecture(folder)
    if not (folder / "tokenizer.json").exists():
        raise _refuse(f"'{folder}' has no tokenizer.json")
    needs_weights = source.load_format not in ("dummy", "null")
    if needs_weights and weights == folder and not any(folder.glob("model*.safetensors*")):
        raise _refuse(f"'{folder}' has no safetensors weights")
    return ModelInfo(
        path=str(folder),
        weights=str(weights),
        name=source.model,
        architecture=arch.name,
        vocab_size=arch.vocab_size,
        context_length=arch.context_length,
        eos_token_ids=eos_token_ids(folder),
        default_sampling=default_sampling(folder),
    )


def _locate(source: ModelConfigSource, progress: Progress) -> tuple[Path, Path]:
    """(the folder of configuration and tokenizer, the weights: the same folder or a .gguf file)."""
    path = Path(source.model).expanduser()
    if path.is_dir():
        return path.absolute(), path.absolute()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _refuse(f"'{path}' does not exist")
        return gguf_folder(path, Path(source.cache_dir).expanduser(), progress), path.absolute()
    if path.is_file():
        raise _refuse(f"'{path}' is neither a model folder nor a .gguf file")
    if source.model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(source.model):
        raise _refuse(f"'{source.model}' does not exist")
    weights = source.load_format not in ("dummy", "null")
    folder = download(source.source, source.model, source.revision, weights=weights, progress=progress)
    return folder, folder


def _refuse(message: str) -> ConfigError:
    return ConfigError(message, setting="MIZZEN_MODEL")


class _Stop(Exception):
    """The supervisor said so."""


def main() -> None:
    with child_process("mizzen.models.prepare") as child:

        def progress(fraction: float, detail: str) -> None:
            child.control.beat("download", fraction=fraction, detail=detail, pending=True)
            if any(isinstance(message, Shutdown) for message in child.control.poll()):
                raise _Stop

        try:
            progress(0.0, child.config.engine.model.model)
            model = prepare_model(child.config.engine.model, progress)
            # said once and early: each rank would say so too, after it has met the others
            parse_architecture(model.path).check_tensor_parallel(child.config.engine.tensor_parallel_size)
            child.control.ready(model=model)
        except _Stop:
            pass


if __name__ == "__main__":
    main()
