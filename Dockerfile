# syntax=docker/dockerfile:1
# Images of one lock file each, for Linux on x86_64:
#   docker build --build-arg TARGET=router -t corun-router:0.1.0 .
#   docker build --build-arg TARGET=cpu -t corun-node:0.1.0-cpu .
#   docker build --build-arg TARGET=gpu -t corun-node:0.1.0-gpu .
# TARGET is the lock: locks/router.txt, locks/cpu.txt or locks/gpu.txt. The router's image also runs gateways.
# BASE is any image of Debian with Python and its venv module.
ARG BASE=python:3.11.13-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TARGET=cpu
# uv takes certificates from the system, so that a company's own authority in the base image is enough.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT=300
COPY locks/build.txt /locks/
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes -r /locks/build.txt \
    && /opt/build/bin/uv venv --python "$(command -v python)" /opt/corun
WORKDIR /src
# Before the sources, so that a change of those does not install a few GB again. The lock is complete, and has what no
# resolver would accept (see [tool.uv] in pyproject.toml), so nothing is resolved. It is compiled here: the root of a pod
# is read-only, and every start of a process would compile it again.
COPY locks/${TARGET}.txt locks/prune.py locks/
RUN /opt/build/bin/uv pip sync --python /opt/corun/bin/python --require-hashes --compile-bytecode locks/${TARGET}.txt
COPY pyproject.toml README.md LICENSE ./
COPY corun corun
COPY router router
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY colocated_node colocated_node
COPY corun_bench corun_bench
RUN /opt/build/bin/hatchling build --target wheel --directory /wheel \
    && /opt/build/bin/uv pip install --python /opt/corun/bin/python --no-deps --no-index --compile-bytecode /wheel/*.whl \
    && /opt/corun/bin/python locks/prune.py "corun-llm[${TARGET},tracing]" > /wheel/unneeded.txt \
    && if [ -s /wheel/unneeded.txt ]; then \
        /opt/build/bin/uv pip uninstall --python /opt/corun/bin/python --requirements /wheel/unneeded.txt; \
    fi

# hadolint ignore=DL3006
FROM ${BASE} AS image
ARG TARGET=cpu
# libnuma is for vLLM on CPUs. On a GPU, Triton and torch's inductor compile small programs when kernels are first used,
# against Python's headers, which the base image has: so that image keeps a compiler. On a CPU nothing is compiled
# (TORCHDYNAMO_DISABLE is pinned), and a router runs no kernels.
# hadolint ignore=DL3008,SC2086
RUN packages="" \
    && case "${TARGET}" in cpu) packages="libnuma1 libgomp1" ;; gpu) packages="libnuma1 libgomp1 g++ libc6-dev" ;; esac \
    && if [ -n "$packages" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends $packages \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin corun
COPY --from=build /opt/corun /opt/corun
# USER is for torch, which names its cache after it also where the platform picks another user. All compiled code is
# cached below one directory, which a volume may keep (k8s/components/compile-cache). The driver's libraries are mounted by NVIDIA's container runtime, if there is one.
ENV PATH=/opt/corun/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/corun \
    USER=corun \
    TORCHINDUCTOR_CACHE_DIR=/home/corun/.cache/torchinductor \
    TRITON_CACHE_DIR=/home/corun/.cache/triton \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="corun" \
    org.opencontainers.image.description="A deterministic prefill-decode LLM serving cluster" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    dev.corun.target="${TARGET}"
USER 10001:10001
WORKDIR /home/corun
CMD ["corun", "--help"]
