"""How rotary frequencies are stretched beyond the trained context: a description only, so that it needs no torch."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """``theta`` and how the frequencies are stretched; fields that ``type`` does not use keep their defaults."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: from factor and the mscales
    mscale: float | None = None
    mscale_all_dim: float | None = None
