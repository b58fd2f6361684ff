"""One decoder for Llama 3, Mistral, Qwen2/2.5 and Qwen3: they differ in biases, Q/K norms and rotary scaling.

A model gets ``(batch, attention)`` passed in and holds no state besides its weights.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from mizzen.attention.base import AttentionBackend, Batch
from mizzen.layers.base import LayerContext, WeightSlice
from mizzen.layers.embedding import VocabEmbedding, VocabShard
from mizzen.layers.linear import ColumnLinear, ColumnPart, RowLinear
from mizzen.layers.norm import RMSNorm
from mizzen.layers.rotary import rotary_table
from mizzen.models.config import ModelArchitecture


class Attention(nn.Module):
    """Merged QKV projection, optional Q/K norms, rotation, attention, output projection."""

    def __init__(self, arch: ModelArchitecture, layer: int, context: LayerContext) -> None:
        super().__init__()
        size, rank = context.group.size, context.group.rank
        self.layer = layer
        self.eps = arch.rms_norm_eps
        self.kernels = context.kernels
        self.head_dim = arch.head_dim
        self.num_heads = arch.num_heads // size
        self.num_kv_heads = arch.kv_heads_per_rank(size)
        # With fewer KV heads than ranks, neighbours share one: rank r's query heads are all of KV head r * kv // size.
        kv_start = rank * arch.num_kv_heads // size * arch.head_dim
        kv_stop = kv_start + self.num_kv_heads * arch.head_dim
        kv_size = arch.num_kv_heads * arch.head_dim
        self.qkv = ColumnLinear(
            arch.hidden_size,
            (
                ColumnPart.split("q_proj", arch.num_heads * arch.head_dim, context),
                ColumnPart("k_proj", kv_size, kv_start, kv_stop),
                ColumnPart("v_proj", kv_size, kv_start, kv_stop),
            ),
            bias=arch.qkv_bias,
            context=context,
        )
        self.q_norm = RMSNorm("q_norm", arch.head_dim, self.eps, context) if arch.qk_norm else None
        self.k_norm = RMSNorm("k_norm", arch.head_dim, self.eps, context) if arch.qk_norm else None
        self.output = RowLinear(
            "o_proj", arch.num_heads * arch.head_dim, arch.hidden_size, bias=arch.output_bias, context=context
        )

    def forward(self, x: Tensor, batch: Batch, rotary: Tensor, attention: AttentionBackend) -> Tensor:  # [T, H]
        q = self.kernels.qk_norm_rope_write_kv(
            self.qkv(x),
            batch.positions,
            rotary,
            attention.kv.k[self.layer],
            attention.kv.v[self.layer],
            batch.kv_slots,
            self.num_heads,
            self.q_norm.weight if self.q_norm is not None else None,
            self.k_norm.weight if self.k_norm is not None else None,
            self.eps,
        )
        out: Tensor = self.output(attention.forward(q, self.layer))
        return out

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        yield from self.qkv.weights(prefix)
        yield from self.output.weights(prefix)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.weights(prefix)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up merged."""

    def __init__(self, arch: ModelArchitecture, context: LayerContext) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(
            arch.hidden_size,
            tuple(ColumnPart.split(name, arch.intermediate_size, context) for name in ("gate_proj", "up_proj")),
            bias=arch.mlp_bias,
            context=context,
        )
        self.down = RowLinear(
            "down_proj", arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias, context=context
        )

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        out: Tensor = self.down(self.gate_up.gated(x))
        return out

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)


class DecoderLayer(nn.Module):
    def __init__(self, arch: ModelArchitecture, layer: int, context: LayerContext) -> None:
        super().__init__()
        self.input_norm = RMSNorm("input_layernorm", arch.hidden_size, arch.rms_norm_eps, context)
        self.attention = Attention(arch, layer, context)
        self.post_norm = RMSNorm("post_attention_layernorm", arch.hidden_size, arch.rms_norm_eps, context)
        self.mlp = GatedMLP(arch, context)

    def forward(self, x: Tensor, residual: Tensor, batch: Batch, rotary: Tensor, attention: AttentionBackend) -> Tensor:
        """x [T, H] is the previous layer's output, not yet added to residual [T, H], which is updated in place."""
        x = self.attention(self.input_norm.add(x, residual), batch, rotary, attention)
        out: Tensor = self.mlp(self.post_norm.add(x, residual))
        return out

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        yield from self.input_norm.weights(prefix)
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.post_norm.weights(prefix)
        yield from self.mlp.weights(f"{prefix}mlp.")


class Decoder(nn.Module):
    """``num_heads`` and ``num_kv_heads`` are this rank's: KVTensors are allocated for them."""

    is_null = False

    def __init__(self, arch: ModelArchitecture, context: LayerContext) -> None:
        super().__init__()
        arch.check_tensor_parallel(context.group.size)
        self.num_layers = arch.num_layers
        self.num_heads = arch.num_heads // context.group.size
        self.num_kv_heads = arch.kv_heads_per_rank(context.group.size)
        self.head_dim = arch.head_dim
        self.vocab_size = arch.vocab_size
        self.dtype = context.dtype
        self.embed = VocabEmbedding("embed_tokens", arch.vocab_size, arch.hidden_size, context)
        self.layers = nn.ModuleList(DecoderLayer(arch, layer, context) for layer in range(arch.num_layers))
        self.norm = RMSNorm("norm", arch.hidden_size, arch.rms_norm_eps, context)
        self.head = (
            self.embed
            if arch.tie_word_embeddings
            else VocabEmbedding("lm_head", arch.vocab_size, arch.hidden_size, context)
        )
        self.rotary: Tensor
        self.register_buffer(
            "rotary", rotary_table(arch.rope, arch.head_dim, arch.context_length, context.device), persistent=False
        )

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """The final, normalized hidden states [T, H]. ``attention.plan(batch)`` must have been called."""
        residual = self.embed(batch.token_ids)  # [T, H]
        x = torch.zeros_like(residual)
        for layer in self.layers:
            x = layer(x, residual, batch, self.rotary, attention)
        return self.norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:  # [S, H] -> [S, V]
        """In the model's dtype, of the whole vocabulary on every rank."""
        return self.head.logits(hidden)

    def local_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:  # [S, H] -> [S, width of the shard]
        """Of this rank's shard of the vocabulary, which is all of it on one rank; in ``out``, if given."""
        return self.head.local_logits(hidden, out)

    @property
    def shard(self) -> VocabShard:
        return self.head.shard

    def weights(self) -> Iterator[WeightSlice]:
        """All that this rank keeps of the checkpoint, in the order of a forward pass."""
        yield from self.embed.weights("model.")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weights(f"model.layers.{index}.")
        yield from chain(self.norm.weights("model."), self.head.weights("") if self.head is not self.embed else ())
