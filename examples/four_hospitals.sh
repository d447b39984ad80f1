#!/usr/bin/env bash
# Four hospitals train one model. Here all four are on one machine; docs/deploy.md has the commands for four machines.
set -euo pipefail
export OMP_NUM_THREADS=1 QG_SECRET=${QG_SECRET:-$(python -c 'import secrets; print(secrets.token_hex(16))')}
PORT=${PORT:-29500}

python "$(dirname "$0")/four_hospitals.py"              # the images of each hospital, and experiment.toml

qg rendezvous --port "$PORT" & rendezvous=$!            # where they find each other; it sees no model and no image
trap 'kill $rendezvous' EXIT

for k in 0 1 2 3; do                                    # each of these commands runs at its own hospital
    qg node experiment.toml --node $k --data hospital-$k --runs runs-$k --rendezvous "127.0.0.1:$PORT" > log-$k.txt 2>&1 &
    nodes[k]=$!
done
for k in 0 1 2 3; do wait "${nodes[k]}"; done

qg export runs-2/* --node 2 --out model.safetensors     # every hospital has its own model, trained with all
qg evaluate model.safetensors folder:hospital-2
