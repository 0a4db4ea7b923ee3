# posttrain-run for NVIDIA GPUs. CI checks this file with hadolint; nobody of this project has built it yet.
#   docker build -f docker/cuda.Dockerfile -t posttrain-run:cuda .
#   docker run --gpus all --shm-size=16g posttrain-run:cuda
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

# Triton compiles kernels with a C compiler when they are first used; git names the code of a run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc g++ git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The usual torch of PyPI brings CUDA's libraries; the driver is the host's.
ARG EXTRAS=ray,math,ifeval
COPY pyproject.toml README.md LICENSE /src/
COPY runner /src/runner
COPY conf /src/conf
COPY recipes /src/recipes
RUN pip install --no-cache-dir "/src[${EXTRAS}]" \
    && useradd --create-home --home-dir /opt/run --uid 1000 run \
    && install --directory --owner=run /opt/run/outputs /opt/run/.cache
ENV TORCHINDUCTOR_CACHE_DIR=/opt/run/.cache/torchinductor TRITON_CACHE_DIR=/opt/run/.cache/triton
USER 1000
WORKDIR /opt/run
VOLUME /opt/run/outputs
HEALTHCHECK --interval=5m --timeout=60s CMD ["run", "doctor", "device=cuda", "--no-trial"]
ENTRYPOINT ["run"]
CMD ["doctor", "device=cuda"]
