# Stands in for NVIDIA's devel image where no registry can be reached: nvcc and its headers from NVIDIA's wheels, as /usr/local/cuda.
# By hand: it proves the cuda target's stages but for its base image (docs/containers.md).
ARG BASE
FROM ${BASE} AS wheels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-venv
RUN --mount=type=secret,id=ca python3 -m venv /tmp/venv \
    && PIP_CERT=/run/secrets/ca /tmp/venv/bin/pip install -q --no-deps --target /tmp/site nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96 nvidia-curand==10.4.0.35 nvidia-cublas==13.1.0.3 \
    && mv /tmp/site/nvidia/cu13 /usr/local/cuda \
    && ln -s lib /usr/local/cuda/lib64 && ln -s libcudart.so.13 /usr/local/cuda/lib/libcudart.so \
    && mkdir -p /usr/local/cuda/lib/stubs

FROM ${BASE}
COPY --from=wheels /usr/local/cuda /usr/local/cuda
