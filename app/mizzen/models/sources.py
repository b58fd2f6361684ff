"""Checkpoints as one thing: named tensors of known shape, any slice of which can be read without the rest."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mizzen.errors import ConfigError
from mizzen.models.config import ModelArchitecture, read_json


class WeightSource(Protocol):
    """Names are those of Hugging Face checkpoints, whatever the file calls them."""

    path: Path

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Indices [start, stop) of dimension ``dim``, on the CPU."""


def refuse(message: str) -> ConfigError:
    return ConfigError(message, setting="MIZZEN_MODEL")


@contextmanager
def open_weights(path: Path, arch: ModelArchitecture, load_format: str = "auto") -> Iterator[WeightSource]:
    """``path``: a .gguf file or a folder of safetensors. Raises ConfigError if there is nothing readable."""
    if load_format == "gguf" or (load_format == "auto" and path.suffix == ".gguf"):
        from mizzen.models.gguf_source import GGUFSource  # gguf is needed for such files only

        yield GGUFSource(path, arch)
        return
    with ExitStack() as stack:
        yield SafetensorsSource(path, stack)


class SafetensorsSource:
    """A folder with model.safetensors, or with shards and their index. Files are mapped, not read."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._files: dict[str, Any] = {}  # tensor name -> open file
        for file, expected in self._expected(path):
            try:
                handle: Any = stack.enter_context(safe_open(file, framework="pt"))
                held = set(handle.keys())
            except FileNotFoundError:
                raise refuse(f"'{file}' {'may not be read by this user' if file.exists() else 'is missing'}") from None
            except (SafetensorError, OSError) as error:
                raise refuse(f"'{file}' is not a readable safetensors file: {error}") from None
            if absent := sorted((expected or held) - held):
                raise refuse(f"'{file}' lacks {absent[0]}, which the index says it holds")
            self._files.update(dict.fromkeys(expected or held, handle))

    @staticmethod
    def _expected(path: Path) -> list[tuple[Path, set[str] | None]]:
        """The files, each with the tensors that the index says it holds."""
        index = path / "model.safetensors.index.json"
        if not index.exists():
            if not (path / "model.safetensors").exists():
                raise refuse(f"'{path}' has neither model.safetensors nor model.safetensors.index.json")
            return [(path / "model.safetensors", None)]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise refuse(f"'{index}' has no weight_map")
        files: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(str(file), set()).add(name)
        return [(path / file, names) for file, names in sorted(files.items())]

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        part = self._files[name].get_slice(name)
        read: Tensor = part[start:stop] if dim == 0 else part[:, start:stop]
        return read
