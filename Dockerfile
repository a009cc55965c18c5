# syntax=docker/dockerfile:1

# BuildKit builds this (`docker build -t tollgate .`): it keeps dependencies and object files in
# cache mounts, so that only what changed is compiled again.

FROM rust:1.95-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends cmake g++ gcc make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
# What a release build is laid out by.
COPY .cargo ./.cargo
COPY profile ./profile
# Cargo.toml names targets in tests and benches: cargo wants to see them, but does not build them here.
COPY benches ./benches
COPY tests ./tests
COPY lua ./lua
COPY migrations ./migrations
COPY src ./src
# Function names stay in the binary for backtraces, line tables do not. The touch makes cargo compile
# this crate in any case: a checkout of an older commit could look fresh to the cached target folder.
ENV CARGO_PROFILE_RELEASE_STRIP=debuginfo
RUN --mount=type=cache,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,target=/src/target,sharing=locked \
    touch src/lib.rs src/main.rs \
 && cargo build --release --locked --bin tollgate \
 && install -D target/release/tollgate /out/tollgate

FROM debian:bookworm-slim
RUN groupadd --gid 10001 tollgate \
 && useradd --no-log-init --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tollgate
COPY --from=build /out/tollgate /usr/local/bin/tollgate
# A container that is scraped from outside needs `admin.address: 0.0.0.0:9090`, as deploy/tollgate.yaml
# has it; this file keeps the admin listener on the container's own loopback.
COPY --chmod=0644 conf/tollgate.yaml /etc/tollgate/tollgate.yaml
# By number, so that Kubernetes' runAsNonRoot can tell. Nothing is written to disk: --read-only works.
USER 10001:10001
RUN ["/usr/local/bin/tollgate", "check", "--config", "/etc/tollgate/tollgate.yaml"]
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/tollgate", "healthcheck", "--url", "http://127.0.0.1:9090/healthz"]
ENTRYPOINT ["/usr/local/bin/tollgate"]
CMD ["serve", "--config", "/etc/tollgate/tollgate.yaml"]
