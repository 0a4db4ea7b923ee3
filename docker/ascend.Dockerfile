# posttrain-run for Ascend NPUs. CI checks this file with hadolint; nobody of this project has built it yet.
# CANN and CONSTRAINTS belong together: docs/npu-versions.md lists the sets.
#   docker build -f docker/ascend.Dockerfile -t posttrain-run:ascend .
#   docker build -f docker/ascend.Dockerfile --build-arg CANN=8.5.0-910b-ubuntu22.04-py3.11 \
#     --build-arg CONSTRAINTS=npu-cann-8.5.txt -t posttrain-run:ascend-8.5 .
ARG CANN=9.0.0-910b-ubuntu22.04-py3.11
FROM quay.io/ascend/cann:${CANN}

# Only x86-64 needs torch's own index: there the CPU build, which torch_npu demands by name, is nowhere else.
ARG CONSTRAINTS=npu-cann-9.0.txt
ARG EXTRAS=npu,math,ifeval
COPY constraints/${CONSTRAINTS} /src/constraints.txt
COPY pyproject.toml README.md LICENSE /src/
COPY runner /src/runner
COPY conf /src/conf
COPY recipes /src/recipes
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' /src/constraints.txt)" \
    && if [ "$(uname -m)" = x86_64 ]; then \
         pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "${torch}+cpu"; \
       fi \
    && pip install --no-cache-dir --constraint /src/constraints.txt "/src[${EXTRAS}]" \
    && pip install --no-cache-dir attrs==25.4.0 decorator==5.2.1 scipy==1.16.3 sympy==1.14.0

# The device files of the host belong to the group HwHiAiUser: ls -ln /dev/davinci0 prints its number.
ARG DEVICE_GROUP=1000
RUN groupadd --non-unique --gid "${DEVICE_GROUP}" npu && useradd --create-home --home-dir /opt/run --uid 1001 --groups npu run \
    && install --directory --owner=run /opt/run/outputs /opt/run/.cache
# CANN below 9 is in another folder.
RUN [ -e /usr/local/Ascend/cann ] || ln -s ascend-toolkit /usr/local/Ascend/cann
USER 1001
WORKDIR /opt/run
VOLUME /opt/run/outputs
ENV SET_ENV=/usr/local/Ascend/cann/set_env.sh \
    TORCHINDUCTOR_CACHE_DIR=/opt/run/.cache/torchinductor TRITON_CACHE_DIR=/opt/run/.cache/triton ASCEND_CACHE_PATH=/opt/run/.cache/ascend
HEALTHCHECK --interval=5m --timeout=60s CMD ["/bin/bash", "-c", "source $SET_ENV && run doctor device=npu --no-trial"]
ENTRYPOINT ["/bin/bash", "-c", "source $SET_ENV && exec run \"$@\"", "run"]
CMD ["doctor", "device=npu"]
