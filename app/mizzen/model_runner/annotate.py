"""Names a model's parts for profiles: layers, their halves, kernels. Nothing is touched unless it is asked for.

A range is where the host launches kernels: in eager steps, and while a graph is captured. A replay has none inside.
"""

from dataclasses import fields, replace

from torch import nn

from mizzen.attention.base import AttentionBackend
from mizzen.layers.linear import ColumnLinear, RowLinear
from mizzen.models.decoder import Attention, Decoder, DecoderLayer, GatedMLP
from mizzen.models.loader import Model
from mizzen.platform.base import Annotate

_NAMES: dict[type[nn.Module], str] = {
    Attention: "attention",
    GatedMLP: "mlp",
    ColumnLinear: "gemm",
    RowLinear: "gemm",
}


def annotate_model(model: Model, annotate: Annotate) -> None:
    """Each layer by its number, attention and mlp in it, GEMMs, the output head, and fused kernels by their names."""
    if not isinstance(model, Decoder):
        return
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            module.forward = annotate(f"layer {module.attention.layer}", module.forward)  # type: ignore[method-assign]
        elif type(module) in _NAMES:
            module.forward = annotate(_NAMES[type(module)], module.forward)
        if kernels := getattr(module, "kernels", None):
            table = {field.name: annotate(field.name, getattr(kernels, field.name)) for field in fields(kernels)}
            module.kernels = replace(kernels, **table)
    model.local_logits = annotate("head", model.local_logits)  # type: ignore[method-assign]  # one object's, not all


def annotate_attention(backend: AttentionBackend, annotate: Annotate) -> None:
    backend.plan = annotate("attention plan", backend.plan)  # type: ignore[method-assign]  # one object's, not all
    backend.forward = annotate("attention kernels", backend.forward)  # type: ignore[method-assign]
