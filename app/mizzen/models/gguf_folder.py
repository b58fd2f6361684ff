"""A GGUF file as a model folder: its configuration and tokenizer, with the weights left in the file or converted too.

A folder appears whole or not at all: it is written beside its place and renamed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from mizzen.errors import ConfigError
from mizzen.models.config import Progress, parse_architecture
from mizzen.models.gguf_config import generation_config, model_config
from mizzen.models.gguf_source import GGUFSource, read_gguf
from mizzen.models.gguf_tokenizer import write_tokenizer

_FORMAT = 1  # raised when a cached folder would be written otherwise: older ones are then made anew
_SHARD_BYTES = 2 << 30


def gguf_folder(path: Path, cache_dir: Path, progress: Progress) -> Path:
    """The folder with ``path``'s configuration and tokenizer, made once; another process may be making it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}", setting="MIZZEN_MODEL") from None
    key = f"{_FORMAT}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    folder = cache_dir / "gguf" / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.exists():
                progress(0.0, f"reading {path.name}")
                reader = read_gguf(path)
                with _appearing(folder) as partial:
                    _write_configs(reader, path, partial)
    except OSError as error:
        raise ConfigError(f"'{cache_dir}' cannot be written: {error}", setting="MIZZEN_CACHE_DIR") from None
    progress(1.0, f"{path.name} is prepared")
    return folder


def convert_gguf(
    gguf_path: Path | str,
    dest_folder: Path | str,
    progress: Progress | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> None:
    """Writes a whole Hugging Face folder: safetensors, tokenizer, configurations. float32 loses nothing that the
    quantized file had. Without ``progress`` a bar is drawn. Raises ConfigError if the file cannot be converted or the
    folder exists."""
    if progress is not None:
        return _convert(Path(gguf_path), Path(dest_folder), progress, dtype)
    with tqdm(total=100, unit="%", bar_format="{desc} {bar} {n:.0f}%", dynamic_ncols=True) as bar:

        def draw(fraction: float, detail: str) -> None:
            bar.set_description_str(detail, refresh=False)
            bar.update(100 * fraction - bar.n)

        return _convert(Path(gguf_path), Path(dest_folder), draw, dtype)


def _convert(path: Path, folder: Path, progress: Progress, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    if folder.exists():
        raise ConfigError(f"'{folder}' exists already", setting="MIZZEN_MODEL")
    progress(0.0, f"reading {path.name}")
    reader = read_gguf(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _appearing(folder) as partial:
        _write_configs(reader, path, partial, torch_dtype=dtype)
        source = GGUFSource(path, parse_architecture(partial))
        names = sorted(source.names())
        target = getattr(torch, dtype)
        shard: dict[str, Any] = {}
        shards: list[list[str]] = []

        def flush() -> None:
            shards.append(list(shard))
            save_file(shard, partial / f"part-{len(shards)}", metadata={"format": "pt"})
            shard.clear()

        for index, name in enumerate(names):
            progress(index / len(names), name)
            shard[name] = source.read(name, 0, 0, source.shape(name)[0]).to(target)
            if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
                flush()
        if shard:
            flush()
        _name_shards(partial, shards)
    progress(1.0, f"{folder} is written")


def _name_shards(folder: Path, shards: list[list[str]]) -> None:
    """The names that loaders look for; how many shards there are is known only now."""
    if len(shards) == 1:
        (folder / "part-1").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_configs(reader: Any, path: Path, folder: Path, **overrides: Any) -> None:
    _write_json(folder / "config.json", model_config(reader) | overrides)
    _write_json(folder / "generation_config.json", generation_config(reader))
    _write_json(folder / "tokenizer_config.json", write_tokenizer(reader, path, folder))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A new folder that takes its name when the block ends well, and vanishes otherwise."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)  # both are made for their owner alone
        for file in partial.iterdir():
            file.chmod(0o644)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
