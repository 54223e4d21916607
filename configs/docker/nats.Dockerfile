# nats-server with our configuration, a data directory that is not root's, and no privileges.
ARG NATS=2.15-alpine
FROM nats:${NATS}
RUN mkdir -p /data && chown 10001:10001 /data
COPY configs/nats.conf /etc/nats/nats-server.conf
USER 10001:10001
CMD ["nats-server", "--config", "/etc/nats/nats-server.conf"]
