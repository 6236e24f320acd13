# Stand-ins for prom/prometheus and prom/alertmanager: Debian's packages, with the commands, the users
# and the folders of those images.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS watchers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends prometheus prometheus-alertmanager \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o nobody /prometheus /alertmanager
USER nobody

FROM watchers AS prometheus
ENTRYPOINT ["prometheus"]

FROM watchers AS alertmanager
ENTRYPOINT ["prometheus-alertmanager"]
CMD ["--config.file=/etc/alertmanager/alertmanager.yml", "--storage.path=/alertmanager"]
