#!/bin/sh
# Compile protos/ into OUT/stretto/v1. Needs grpcio-tools and mypy-protobuf on PATH (see Makefile).
set -eu
out=${1:?folder}
mkdir -p "$out"
python -m grpc_tools.protoc -Iprotos --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  protos/stretto/v1/*.proto
