"""Rotary embeddings as one table: the angles at a position depend on nothing but the position.

That is what makes a cached page valid for any later request. Dynamic scaling keeps it too: the token at position p is
rotated as a sequence of p + 1 tokens would be, which is what incremental decoding does elsewhere. Sources: Su et al.,
arXiv:2104.09864; YaRN, Peng et al., arXiv:2309.00071; the llama3 rule is that of Llama 3.1's release.
"""

import math

import torch
from torch import Tensor

from mizzen.layers.rope_scaling import RopeScaling


def rotary_table(scaling: RopeScaling, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, head_dim] float32: at each position the cosines of head_dim / 2 angles, then their sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    if scaling.type == "dynamic":
        lengths = torch.clamp(positions + 1, min=scaling.original_max_positions)
        stretch = scaling.factor * lengths / scaling.original_max_positions - (scaling.factor - 1)
        theta = scaling.theta * stretch ** (head_dim / (head_dim - 2))  # [positions]
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = positions[:, None] / theta[:, None] ** exponents
        magnitude = 1.0
    else:
        frequencies, magnitude = _frequencies(scaling, head_dim)
        angles = torch.outer(positions, frequencies)
    return (torch.cat((angles.cos(), angles.sin()), -1) * magnitude).to(device)


def _frequencies(scaling: RopeScaling, head_dim: int) -> tuple[Tensor, float]:
    """The head_dim / 2 angles a position adds, and what cosines and sines are multiplied by."""
    plain = 1.0 / scaling.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(scaling, plain), 1.0
    if scaling.type == "yarn":
        return _yarn(scaling, plain, head_dim), _yarn_magnitude(scaling)
    return plain, 1.0


def _llama3(scaling: RopeScaling, plain: Tensor) -> Tensor:
    """Waves short against the trained context stay, long ones are stretched, those between are blended."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # full turns within the trained context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(scaling: RopeScaling, plain: Tensor, head_dim: int) -> Tensor:
    """The same idea, the blend being linear in the frequency's index."""

    def index_of(turns: float) -> float:
        """The (fractional) index of the frequency that turns so often within the trained context."""
        ratio = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(scaling.theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a step where both ends meet
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return stretched * plain / scaling.factor + (1 - stretched) * plain


def _yarn_magnitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
