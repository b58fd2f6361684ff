# Debian's Prometheus and Alertmanager, to stand in for the images that the compose file names where no registry can be reached.
ARG BASE
FROM ${BASE} AS base
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus prometheus-alertmanager wget \
    && rm -rf /var/lib/apt/lists/*

FROM base AS prometheus
RUN install -d -o nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]

FROM base AS alertmanager
RUN install -d -o nobody /alertmanager
USER nobody
ENTRYPOINT ["prometheus-alertmanager"]
