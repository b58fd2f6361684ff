"""Philox 4x32-10 (Salmon et al., 2011): one random number a row, from (seed, output index) alone.

The same counter and key layout as Triton's ``tl.rand(seed, offset)``, so that a GPU kernel draws the same numbers.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox_uniform(seed: Tensor, offset: Tensor) -> Tensor:
    """seed [S] int64, offset [S] int64 (below 2**32) -> [S] float32, uniform in [0, 1)."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0 = offset & _MASK
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, so bits 32..63 are right whatever the sign
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    signed = torch.where(c0 >= 2**31, c0 - 2**32, c0)
    magnitude = torch.where(signed < 0, -signed - 1, signed)
    return magnitude.to(torch.float32) * 4.6566127342e-10
