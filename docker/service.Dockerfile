# The service: coordinator and reducer in one process, without PyTorch.
#
#   docker build -f docker/service.Dockerfile -t andon-service .
#
# The classic builder and BuildKit both build it. So no step has a cache mount, which the classic one
# refuses: the packages are in a layer of their own instead, which a change of the sources keeps.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
# gcc builds the C part of the averaging.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt ./
# `certs` is for the container that makes certificates, in docker-compose.tls.yml.
RUN python -m venv --without-pip /opt/andon \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['certs'], sep='\n')" > packages.txt \
    && python -m pip --python /opt/andon/bin/python install --no-cache-dir -c constraints.txt \
        -r packages.txt
COPY hatch_build.py README.md LICENSE ./
COPY proto proto
COPY services services
COPY trainer trainer
# An image without the C part would work, and average slower for good: so it is not built.
RUN ANDON_C_PART=required python -m pip --python /opt/andon/bin/python install --no-cache-dir \
        -c constraints.txt '.[certs]' \
    && /opt/andon/bin/python -c 'import andon.protocol._fused'

FROM ${BASE}
# A volume that is mounted on one of these folders gets its owner.
RUN groupadd --gid 10001 andon \
    && useradd --uid 10001 --gid 10001 --create-home andon \
    && install -d -o andon -g andon /srv/andon /srv/andon/runs /srv/andon/certs \
        /srv/andon/certs/ca /srv/andon/certs/andon /srv/andon/certs/trainer
COPY --from=build /opt/andon /opt/andon
ENV PATH=/opt/andon/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /srv/andon
USER 10001:10001
EXPOSE 7070 7170 9400
# A halted line is healthy: a restart would not fix it, and would only end its workers' streams.
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["andon", "health", "--address", "127.0.0.1:7070"]
CMD ["andon", "serve", "--bind", "0.0.0.0", "--insecure", "--workers", "2", "--tcp-port", "7170"]
