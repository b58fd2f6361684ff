"""How keys are found in pages, for all attention kernels."""

import triton
import triton.language as tl


@triton.jit
def pages_of(table, first, length, column, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of keys [first, first + BLOCK_N), first a multiple of BLOCK_N: one number where all lie in one page,
    else one a key. ``column``: arange(0, BLOCK_N). Keys from ``length`` on get page 0, and must not be read."""
    if PAGE_SIZE >= BLOCK_N:
        pages = tl.load(table + first // PAGE_SIZE, mask=first < length, other=0)
    else:
        pages = tl.load(table + (first + column) // PAGE_SIZE, mask=first + column < length, other=0)
    return pages
