"""A model that does nothing: what is left of a step's time is the host's own cost."""

import torch
from torch import Tensor, nn

from mizzen.attention.base import AttentionBackend, Batch
from mizzen.distributed.group import SingleGroup
from mizzen.layers.embedding import VocabShard
from mizzen.models.config import ModelArchitecture


class NullModel(nn.Module):
    """The decoder's interface without weights. A runner that sees ``is_null`` makes tokens without logits; whoever
    asks for them gets zeros, whose argmax is token 0."""

    is_null = True

    def __init__(self, arch: ModelArchitecture, tensor_parallel_size: int, device: torch.device) -> None:
        super().__init__()
        arch.check_tensor_parallel(tensor_parallel_size)
        self.num_layers = 1  # the KV cache costs no memory to speak of
        self.num_heads = self.num_kv_heads = 1
        self.head_dim = 2
        self.vocab_size = arch.vocab_size
        self.dtype = torch.float32
        self.device = device
        self.shard = VocabShard(SingleGroup(), 0, arch.vocab_size, arch.vocab_size)

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        return torch.zeros((len(batch.token_ids), 1), device=self.device)  # [T, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros((1, 1), device=self.device).expand(len(hidden), self.vocab_size)  # [S, V]

    def local_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.logits(hidden) if out is None else out.zero_()
