#!/usr/bin/env bash
# Builds both images on a Debian base made here and runs them read-only as nobody: docker/try.sh [WORK FOLDER]
#
# Needs root, debootstrap, podman and runc (Debian 12: apt-get install debootstrap podman runc). Where pip reads local
# folders, name them: PIP_FOLDERS="/a /b". Pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) are
# passed on. STORAGE_DRIVER=vfs works where there is no overlay file system. Nothing of it is part of `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
WORK=${1:-$(mktemp -d)}
mkdir -p "$WORK"
BASE=localhost/tandem-base:12
PODMAN=(podman --root "$WORK/storage" --runroot "$WORK/run" --runtime runc --cgroup-manager cgroupfs --storage-driver "${STORAGE_DRIVER:-overlay}")

if ! "${PODMAN[@]}" image exists "$BASE"; then
    [ -d "$WORK/base/usr" ] || debootstrap --variant=minbase --include=python3,python3-venv,g++,libc6-dev,python3-dev,ca-certificates bookworm "$WORK/base"
    tar -C "$WORK/base" -c . | "${PODMAN[@]}" import - "$BASE"
fi

arguments=(--network host --build-arg "BASE=$BASE")
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
    value=${!name:-}
    [ -z "$value" ] || arguments+=(--build-arg "$name=$value")
done
for folder in ${PIP_FOLDERS:-}; do arguments+=(--volume "$folder:$folder:ro"); done
# A certificate authority of one's own, such as a company's.
[ ! -f /etc/ssl/certs/ca-certificates.crt ] || arguments+=(--volume /etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt)
[ ! -f /etc/pip.conf ] || arguments+=(--volume /etc/pip.conf:/etc/pip.conf:ro)
for image in proxy engine; do
    "${PODMAN[@]}" build "${arguments[@]}" -f "docker/$image.Dockerfile" -t "tandem-$image" .
done

# As the chart has it with values-cpu-demo.yaml: settings, and limits that add up to less than 2 CPUs and 4 GiB (a test
# compares). podman's own limits of descriptors and processes are above what root may have in many a container.
run=(run --detach --network host --read-only --tmpfs /tmp:rw,exec --user 10001:10001 --cap-drop all --security-opt no-new-privileges --ulimit nofile=4096:4096 --ulimit nproc=4096:4096)
engine=("${run[@]}" --tmpfs /dev/shm:rw,size=64m --cpus 0.75 --memory 1600m --memory-swap 1600m)
settings=(--kv-bytes 134217728 --num-threads 1 --max-num-seqs 16 --transport zmq)
names=(prompt completion proxy)
trap '"${PODMAN[@]}" rm --force --time 5 "${names[@]/#/try-}" >/dev/null 2>&1 || true' EXIT
started=$SECONDS
"${PODMAN[@]}" "${engine[@]}" --name try-prompt tandem-engine python -m prompt_service "${settings[@]}" --port 17001
"${PODMAN[@]}" "${engine[@]}" --name try-completion tandem-engine python -m completion_service "${settings[@]}" --port 17002
"${PODMAN[@]}" "${run[@]}" --cpus 0.35 --memory 640m --memory-swap 640m --name try-proxy tandem-proxy python -m proxy --port 18000 \
    --prompt-url http://127.0.0.1:17001 --completion-url http://127.0.0.1:17002
for _ in $(seq 180); do
    if curl -sf --noproxy '*' http://127.0.0.1:18000/health/ready >/dev/null; then break; fi
    sleep 1
done
echo "ready after $((SECONDS - started)) s"
for name in "${names[@]}"; do "${PODMAN[@]}" logs --tail 3 "try-$name"; done
PROXY_URL=http://127.0.0.1:18000 python3 helm/tandem/files/ask.py
[ "$(uname -m)" != x86_64 ] || curl -sf --noproxy '*' http://127.0.0.1:17001/info | grep -o '"kernels":"native"'
"${PODMAN[@]}" exec try-proxy python -c 'from proxy.native import loading; print("plain streams:", loading.REASON or "compiled")'
"${PODMAN[@]}" exec try-prompt sh -c 'id -u; touch /opt/x 2>&1 || true'
for name in "${names[@]}"; do
    "${PODMAN[@]}" exec "try-$name" sh -c 'cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes /sys/fs/cgroup/memory.peak 2>/dev/null || true' |
        sed "s/^/$name has used at most so many bytes: /"
done
"${PODMAN[@]}" stop --time 60 try-proxy try-completion try-prompt
for name in "${names[@]}"; do
    echo "$name left with $("${PODMAN[@]}" inspect --format '{{.State.ExitCode}}' "try-$name")"
done
"${PODMAN[@]}" images
