#!/usr/bin/env bash
# Proves docker/ on a Debian machine that reaches packages but no registry of images: builds the
# image, brings the federation up, and looks at its results and its walls.
#
# An engine of its own runs in a network, a process space and mounts of its own, which end with this
# script however it ends; the machine's engine, firewall, bridges and forwarding are never touched.
# Packages that were missing are installed and removed again. Takes minutes and 10 GB of disk.
#
# Exit status: 0 proven, 1 refuted, 77 skipped, since root, packages or space cannot be had.
#
#   TORCH   see docker/Dockerfile; empty: as constraints.txt has it. By default a build for the CPU,
#           where pip finds one.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=bookworm PYTHON=python3.11 # of that suite
DISK_GB=10
SKIPPED=77
# What an engine makes wherever its data are; what was not there before is removed.
FOLDERS=(/etc/docker /opt/containerd /run/containerd /run/docker /run/mount)

skip() { echo "docker/check.sh: skipped: $1" >&2; exit $SKIPPED; }
fail() { echo "docker/check.sh: FAILED: $1" >&2; exit 1; }
step() { printf -- '-- %s (%ss)\n' "$1" "$SECONDS"; }

# --------------------------------------------------------------------- on the machine itself

# What must be the same before and after, as far as this script could have changed it.
machine() {
    ip -o link show | cut -d: -f2
    cat /proc/sys/net/ipv4/ip_forward
    iptables-save 2>/dev/null | grep -v '^[#:]' || true
    grep -F "$work" /proc/mounts || true
    find /sys/fs/cgroup -type d -name "$(basename "$work")" 2>/dev/null || true
}

install_packages() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v docker >/dev/null || missing+=(docker.io)
    command -v docker-compose >/dev/null || missing+=(docker-compose)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v ip >/dev/null || missing+=(iproute2)
    [ ${#missing[@]} -gt 0 ] || return 0
    mkdir "$work/apt"
    # The package of the engine would start one, which takes hold of bridges and firewall.
    hold_services
    apt_get install --no-install-recommends "${missing[@]}" \
        || { apt_get update && apt_get install --no-install-recommends "${missing[@]}"; } \
        || { release_services; return 1; }
    release_services
}

# A history of its own says what these calls installed; others may install things meanwhile.
apt_get() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=120 -o "Dir::Log=$work/apt" \
        "$@" >>"$work/apt.log" 2>&1
}

installed_here() {
    sed -n 's/^Install: //p' "$work/apt/history.log" 2>/dev/null | sed 's/([^)]*)//g' | tr ', ' '\n\n' \
        | sed '/^$/d' | sort -u
}

# Packages that were missing, unless somebody else's now need them.
remove_packages() {
    local added removed
    mapfile -t added < <(installed_here)
    [ ${#added[@]} -gt 0 ] || return 0
    removed=$(apt-get -qq -s purge "${added[@]}" | sed -n 's/^\(Purg\|Remv\) \([^ ]*\).*/\2/p' | sort -u)
    if [ -n "$(comm -23 <(sed 's/:.*//' <<<"$removed") <(printf '%s\n' "${added[@]}" | sed 's/:.*//' | sort -u))" ]; then
        echo "docker/check.sh: others now need some of these, which stay: ${added[*]}" >&2
        return 0
    fi
    apt_get purge "${added[@]}"
}

hold_services() {
    [ ! -e /usr/sbin/policy-rc.d ] || return 0
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    held=yes
}

release_services() { [ -z "${held:-}" ] || rm -f /usr/sbin/policy-rc.d; held=; }

clean() {
    status=$?
    trap '' INT TERM HUP
    [ -z "${making:-}" ] || kill "$making" 2>/dev/null || true
    [ -z "${inside:-}" ] || kill -KILL "$inside" 2>/dev/null || true
    wait 2>/dev/null || true
    # What a killed engine leaves, once the kernel has ended its processes; the deepest first.
    for _ in $(seq 40); do
        find /sys/fs/cgroup -depth -type d -path "*/$(basename "$work")*" -exec rmdir {} + 2>/dev/null \
            && break
        sleep 0.25
    done
    release_services
    if [ -n "${before:-}" ] && [ "$before" != "$(machine)" ]; then
        echo "docker/check.sh: FAILED: the machine is not as it was:" >&2
        diff <(echo "$before") <(machine) >&2 || true
        status=1
    fi
    remove_packages || { tail -n 5 "$work/apt.log" >&2; status=1; }
    if ! pgrep -x dockerd >/dev/null && ! pgrep -x containerd >/dev/null && { [ -e "$work/had-engine" ] || ! command -v dockerd >/dev/null; }; then
        # Nobody has begun to use an engine meanwhile, whose folders and group these would be.
        [ -e "$work/had-group" ] || groupdel docker 2>/dev/null || true
        rm -rf "${absent[@]}" || status=1
    fi
    rm -rf "$work" || status=1
    [ "$status" != 0 ] || echo "docker/check.sh: passed (${SECONDS}s)"
    exit "$status"
}

outside() {
    [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] || skip "needs to be root on Linux"
    command -v apt-get >/dev/null || skip "needs Debian's packages, and there is no apt-get"
    "$PYTHON" -m pip --version >/dev/null 2>&1 || skip "needs $PYTHON with pip, to fetch wheels"
    unshare --mount --net --pid --fork true 2>/dev/null || skip "may not make namespaces"
    local folder
    absent=()
    for folder in "${FOLDERS[@]}"; do [ -e "$folder" ] || absent+=("$folder"); done
    work=$(mktemp -d /var/tmp/fedsim-docker-XXXXXX)
    trap clean EXIT
    trap 'exit 130' INT TERM HUP
    [ "$(df --output=avail -BG "$work" | tail -1 | tr -dc 0-9)" -ge $DISK_GB ] \
        || skip "needs $DISK_GB GB of disk in /var/tmp"

    step "packages"
    ! getent group docker >/dev/null || touch "$work/had-group"
    ! command -v dockerd >/dev/null || touch "$work/had-engine"
    install_packages || { tail -n 5 "$work/apt.log" >&2; skip "packages of Debian cannot be had"; }
    before=$(machine)

    step "base image of $SUITE, wheels"
    unshare --mount debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
        "$SUITE" "$work/base" >"$work/base.log" 2>&1 &
    making=$!
    fetch_wheels || { tail -n 5 "$work/wheels.log" >&2; skip "Python packages cannot be had"; }
    wait "$making" || { tail -n 5 "$work/base.log" >&2; skip "a base image cannot be made"; }
    making=

    unshare --mount --net --pid --fork --kill-child --mount-proc \
        bash docker/check.sh inside "$work" "$torch" &
    inside=$!
    wait "$inside" || fail "see above"
    inside=
    step "clean up"
}

# With the machine's own pip, its index and its certificates: the builder then needs none of them.
fetch_wheels() {
    torch=${TORCH-torch==2.13.0+cpu torchvision==0.28.0}
    mkdir "$work/wheels"
    local pip=("$PYTHON" -m pip --disable-pip-version-check --quiet)
    if [ -n "$torch" ] && ! "${pip[@]}" download --no-deps --dest "$work/wheels" "${torch%% *}" \
            >"$work/wheels.log" 2>&1; then
        echo "no build of torch for the CPU here: takes that of constraints.txt, with CUDA"
        torch=
    fi
    "$PYTHON" - >"$work/requirements.txt" <<'END'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
print(*project["project"]["dependencies"], *project["build-system"]["requires"], "wheel", sep="\n")
END
    cp constraints.txt "$work/constraints.txt"
    if [ -n "$torch" ]; then
        sed -i '/^torch\(vision\)\?==/d' "$work/constraints.txt"
        printf '%s\n' $torch >>"$work/constraints.txt"
    fi
    "${pip[@]}" wheel --wheel-dir "$work/wheels" --find-links "$work/wheels" \
        --constraint "$work/constraints.txt" --requirement "$work/requirements.txt" \
        >"$work/wheels.log" 2>&1
}

# ------------------------------------------------ in a network and a process space of its own

compose() { docker-compose "${files[@]}" "$@"; }

container() { compose ps -q "$1"; }

start_engine() {
    ip link set lo up
    export DOCKER_HOST="unix://$work/docker.sock" DOCKER_CONFIG="$work/config"
    export COMPOSE_HTTP_TIMEOUT=300 DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0 # neither needs a plugin or an image
    dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" \
        --pidfile "$work/docker.pid" --bridge none --cgroup-parent "/$(basename "$work")" \
        >"$work/dockerd.log" 2>&1 &
    engine=$!
    for _ in $(seq 60); do
        ! docker version >/dev/null 2>&1 || return 0
        kill -0 "$engine" 2>/dev/null || break
        sleep 0.5
    done
    tail -n 5 "$work/dockerd.log" >&2
    fail "the engine does not start"
}

build_image() {
    tar -C "$work/base" -c . | docker import - fedsim-base >/dev/null
    "$PYTHON" -m http.server --bind 127.0.0.1 --directory "$work/wheels" 8765 >/dev/null 2>&1 &
    cat >"$work/build.yml" <<'END'
version: "3.8"
services:
  keys: {build: {network: host}}
END
    export BASE=fedsim-base TORCH="$torch" FEDSIM_IMAGE=fedsim-check
    PIP_NO_INDEX=1 PIP_FIND_LINKS=http://127.0.0.1:8765/ compose build --quiet keys \
        >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2; fail "the image does not build"; }
}

# Runs a command in the image as a service would, after options of `docker run` and `--`.
run_image() {
    local options=()
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    docker run --rm --init --read-only --cap-drop ALL --security-opt no-new-privileges \
        --tmpfs /tmp "${options[@]}" "$FEDSIM_IMAGE" "$@"
}

check_image() {
    [ "$(docker image inspect -f '{{.Config.User}}' "$FEDSIM_IMAGE")" = fedsim ] \
        || fail "the image runs as root"
    run_image --network none -- sh -c '
        for tool in gcc cc c++ make ld pip pip3 git; do
            ! command -v "$tool" || exit 1
        done
        ! find / -xdev \( -name "*.key" -o -name "*.secret" -o -name "node-*.pub" \) 2>/dev/null \
            | grep .' || fail "the image holds build tools or keys"
}

wait_for_end() {
    # It returns when all have started, the last of them after the others have ended.
    if ! timeout 1500 docker-compose "${files[@]}" up --no-build -d >"$work/up.log" 2>&1 \
            || [ "$(timeout 600 docker wait "$(container collect)")" != 0 ]; then
        tail -n 5 "$work/up.log" >&2
        compose ps >&2
        compose logs --tail 15 >&2
        fail "the federation does not end with a report"
    fi
}

check_containers() {
    local name state
    for name in superlink gate node-0 node-1 node-2; do
        state=$(docker inspect -f '{{.State.Health.Status}}' "$(container $name)")
        [ "$state" = healthy ] || fail "$name is $state"
    done
    for name in $(compose ps -q); do
        state=$(docker inspect -f '{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}} {{.HostConfig.Privileged}} {{.Config.User}}' "$name")
        [ "$state" = "true [ALL] [no-new-privileges:true] false fedsim" ] || fail "$name: $state"
        state=$(docker inspect -f '{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}}' "$name")
        [[ $state =~ ^[1-9][0-9]*\ [1-9][0-9]*$ ]] || fail "$name has no limits: $state"
    done
    [ "$(docker inspect -f '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}' \
        "$(container node-0)")" = "fedsim-check_outside " ] || fail "a node is on another network"
}

check_results() {
    run_image --network none --volume fedsim-check_out:/out:ro -- python -c '
import json
from collections import Counter
from pathlib import Path

rows = [json.loads(line) for line in Path("/out/results.jsonl").read_text().splitlines()]
rounds = [json.loads(line) for line in Path("/out/rounds.jsonl").read_text().splitlines()]
print("rows:", dict(Counter(row["status"] for row in rows)), "rounds:", len(rounds))
assert rows and {row["status"] for row in rows} == {"ok"}, rows[0]
assert all(row["metrics"]["psnr"] is not None for row in rows)
assert {row["privacy"]["noise_key"] for row in rows} == {"node"}, rows[0]["privacy"]
assert len(rounds) == 4
page = Path("/out/report.html").read_text()
assert "<html" in page
print("report.html:", len(page), "bytes")' || fail "the results are not there"
}

# Somebody on the nodes' network, with the authority's certificate and keys of their own.
check_stranger() {
    local address
    address=$(docker inspect -f '{{with index .NetworkSettings.Networks "fedsim-check_inside"}}{{.IPAddress}}{{end}}' "$(container superlink)")
    local register=(fedsim register /tmp/keys/runner/node-0.pub --root-certificates /keys/ca.crt)
    local made="fedsim keys /tmp/keys --nodes 1 --host stranger >/dev/null"
    local mounted=(--volume fedsim-check_keys-node-0:/keys:ro)

    said=$(run_image --network fedsim-check_outside "${mounted[@]}" -- \
        sh -c "$made && ${register[*]} --superlink gate:9000" 2>&1) && fail "the gate registers strangers"
    grep -q 'status 404 not the Fleet API' <<<"$said" || fail "the gate refused otherwise: $said"

    said=$(run_image --network fedsim-check_outside "${mounted[@]}" -- \
        fedsim run /scenarios/network/tiny.yaml --out /tmp/out --superlink gate:9000 \
        --root-certificates /keys/ca.crt 2>&1) && fail "the gate starts runs of strangers"
    grep -q 'status 404 not the Fleet API' <<<"$said" || fail "the gate refused otherwise: $said"

    for address in "superlink" "$address"; do
        said=$(run_image --network fedsim-check_outside "${mounted[@]}" -- \
            sh -c "$made && ${register[*]} --superlink $address:8000" 2>&1) \
            && fail "nodes' network reaches the SuperLink at $address"
        grep -q 'nobody answers' <<<"$said" || fail "the SuperLink refused otherwise: $said"
    done

    said=$(run_image --network fedsim-check_outside "${mounted[@]}" -- timeout 200 sh -c "$made && \
        fedsim node --superlink gate:9000 --root-certificates /keys/ca.crt --key /tmp/keys/node-0/key \
        --client 0 --data scenario --home /tmp/home 2>&1 | grep -m 1 joined") || true
    [[ $said == "not joined: the SuperLink refuses its key: "* ]] || fail "an unregistered node: ${said:-says nothing}"

    # The same words pass where they may, so that the refusals above mean something.
    run_image --network fedsim-check_inside "${mounted[@]}" -- \
        sh -c "$made && ${register[*]} --superlink superlink:8000" >/dev/null \
        || fail "the runner's network cannot register"
}

check_nothing_left() {
    compose down --volumes --timeout 20 >"$work/down.log" 2>&1 || fail "$(tail -n 3 "$work/down.log")"
    docker image rm --force fedsim-check fedsim-base >/dev/null
    docker image prune --force >/dev/null
    local left
    left=$(docker ps -aq; docker volume ls -q; docker network ls -q --filter type=custom; docker image ls -aq)
    [ -z "$left" ] || fail "left behind: $left"
    ! iptables-save | grep -- '-i br-' || fail "firewall rules are left behind"
}

inside() {
    work=$1 torch=$2
    files=(--project-name fedsim-check --file docker/docker-compose.yml --file "$work/build.yml")
    trap '[ -z "${engine:-}" ] || { kill "$engine"; wait "$engine"; } 2>/dev/null || true' EXIT
    step "engine"
    start_engine
    step "image"
    build_image
    docker image ls --format '{{.Repository}} {{.Size}}' fedsim-check
    check_image
    step "up, until the report is there"
    wait_for_end
    step "containers"
    check_containers
    compose ps
    step "results"
    check_results
    step "strangers"
    check_stranger
    step "down"
    check_nothing_left
}

if [ "${1:-}" = inside ]; then
    inside "$2" "$3"
else
    outside
fi
