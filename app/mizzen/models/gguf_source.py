"""A GGUF file under Hugging Face's names and row order, dequantized slice by slice.

llama.cpp stores the Q and K projections of Llama-family files with the rows of each head reordered, for rotary
embeddings that pair neighbours instead of halves: reading puts them back.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf.quants import dequantize

from mizzen.errors import ConfigError
from mizzen.models.config import ModelArchitecture

if TYPE_CHECKING:
    from torch import Tensor

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Not weights: prepare.py has turned it into the configuration's rope scaling.
ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path) -> Any:
    """A gguf.GGUFReader, which maps the file. Raises ConfigError if it is missing, cut short or not GGUF."""
    try:
        reader = gguf.GGUFReader(path)
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist", setting="MIZZEN_MODEL") from None
    # What the reader raises on bytes that make no sense depends on where they are.
    except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError, struct.error) as error:
        raise ConfigError(
            f"'{path}' is not a readable GGUF file: {str(error) or type(error).__name__}", setting="MIZZEN_MODEL"
        ) from None
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > len(reader.data):
            raise ConfigError(f"'{path}' is cut short: {tensor.name} lies beyond its end", setting="MIZZEN_MODEL")
    return reader


def metadata(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


class GGUFSource:
    def __init__(self, path: Path, arch: ModelArchitecture) -> None:
        self.path = path
        reader = read_gguf(path)
        permuted = metadata(reader, "general.architecture") == "llama"
        self._head_dim = arch.head_dim
        self._tensors = {
            _hugging_face_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS
        }
        self._permuted = {name for name in self._tensors if permuted and (".q_proj." in name or ".k_proj." in name)}

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, dim: int, start: int, stop: int) -> "Tensor":
        """float32. Slices of permuted tensors must be of whole heads, and are."""
        import torch  # reading a file's metadata, all that the download phase does, goes without

        tensor = self._tensors[name]
        values = self._dequantize(tensor, tensor.data[start:stop]) if dim == 0 else self._columns(tensor, start, stop)
        if name in self._permuted:
            assert dim == 1 or start % self._head_dim == stop % self._head_dim == 0
            heads = values.reshape(-1, self._head_dim // 2, 2, *values.shape[1:])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # torch wants writable memory

    def _columns(self, tensor: Any, start: int, stop: int) -> "np.ndarray[Any, Any]":
        """Columns [start, stop): the blocks that hold them are dequantized, and no others."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        first, last = start // block, -(-stop // block)
        stored = tensor.data.view(np.uint8)[:, first * block_bytes : last * block_bytes]
        values = self._dequantize(tensor, np.ascontiguousarray(stored))
        return values[:, start - first * block : stop - first * block]

    def _dequantize(self, tensor: Any, stored: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        try:
            values: np.ndarray[Any, Any] = dequantize(stored, tensor.tensor_type)
        except NotImplementedError:
            raise ConfigError(
                f"{self.path}: {tensor.name} is of type {tensor.tensor_type.name}, which is not supported",
                setting="MIZZEN_MODEL",
            ) from None
        return values


def _hugging_face_name(name: str) -> str:
    """A name that has no counterpart is kept, and so reported as unexpected."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
