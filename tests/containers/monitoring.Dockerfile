# Debian's Prometheus and Alertmanager, to stand in for the images that the compose file names where no registry can be reached.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE} AS base
# hadolint ignore=DL3008  # what Debian has: no more is tested with it than that it scrapes
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus prometheus-alertmanager wget \
    && rm -rf /var/lib/apt/lists/*

FROM base AS prometheus
RUN install -d -o nobody /prometheus
# hadolint ignore=DL3066  # by name in its image too
USER nobody
ENTRYPOINT ["prometheus"]

FROM base AS alertmanager
RUN install -d -o nobody /alertmanager
# hadolint ignore=DL3066  # by name in its image too
USER nobody
ENTRYPOINT ["prometheus-alertmanager"]
