"""The table of kernels for NVIDIA GPUs: Triton's where there is one, torch's else."""

from mizzen.kernels.dispatch import Kernels
from mizzen.kernels.triton.activation import silu_mul
from mizzen.kernels.triton.cache_keys import fix_cache_keys
from mizzen.kernels.triton.gemm import gated_linear, linear
from mizzen.kernels.triton.norms import add_rms_norm, rms_norm
from mizzen.kernels.triton.rope import qk_norm_rope_write_kv

KERNELS = Kernels(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    qk_norm_rope_write_kv=qk_norm_rope_write_kv,
    silu_mul=silu_mul,
    linear=linear,
    gated_linear=gated_linear,
)

fix_cache_keys()
