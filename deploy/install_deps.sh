#!/usr/bin/env bash
# Installs what TensorFold needs from the distribution's packages. Debian 12 and Ubuntu 24.04.
#   deploy/install_deps.sh build   to build and run
#   deploy/install_deps.sh test    also what the tests need
# docs/dependencies.md says why each is there.
set -euo pipefail

build=(
  build-essential cmake ninja-build ccache pkg-config git ca-certificates curl python3
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libyaml-cpp-dev libucx-dev libcli11-dev libspdlog-dev libfmt-dev libpcre2-dev libssl-dev
  prometheus-cpp-dev libcurl4-openssl-dev zlib1g-dev libxxhash-dev libzstd-dev libgtest-dev libgmock-dev
)
test=(clang clang-format clang-tidy libclang-rt-dev g++-aarch64-linux-gnu qemu-user iproute2 procps)

. /etc/os-release
case "$ID-$VERSION_ID" in
  debian-12)
    build+=(libboost1.81-dev libboost-json1.81-dev)
    test=("${test[@]/libclang-rt-dev/libclang-rt-14-dev}")
    ;;
  ubuntu-24.04)
    build+=(libboost-dev libboost-json-dev)
    test=("${test[@]/libclang-rt-dev/libclang-rt-18-dev}")
    ;;
  *)
    echo "error: packages are known for Debian 12 and Ubuntu 24.04, this is $PRETTY_NAME; docs/dependencies.md lists what to install" >&2
    exit 1
    ;;
esac

packages=("${build[@]}")
case "${1:-build}" in
  build) ;;
  test) packages+=("${test[@]}") ;;
  *)
    echo "usage: $0 build|test" >&2
    exit 2
    ;;
esac

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "error: needs root or sudo to install: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "installing ${#missing[@]} packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
