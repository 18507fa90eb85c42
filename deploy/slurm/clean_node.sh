#!/bin/bash
# Ends what earlier jobs of this user left on a node: processes of runs, engines and learners, and their shared memory.
# For a node that one job has to itself: it ends such processes of the user's other jobs on the node as well.
set -uo pipefail

# By command line, and by name: an engine's processes rename themselves.
lines=(tasks.inference.engine.host tasks.inference.environments.host tasks.learner.worker flows.services.stand_in flows/services/guardian.py torchrun)
names=('VLLM::' 'vllm')

left() {
    for line in "${lines[@]}"; do pgrep -u "$USER" -f -- "$line"; done
    for name in "${names[@]}"; do pgrep -u "$USER" -- "$name"; done
}

for signal in TERM KILL; do
    found=$(left | sort -u)
    [ -z "$found" ] && break
    echo "$(hostname): $signal to $(echo "$found" | wc -w) processes that were left"
    # shellcheck disable=SC2086
    kill -s "$signal" $found 2>/dev/null
    sleep 3
done

# Files of this user alone; those of processes that live stay usable for them.
find /dev/shm /tmp -maxdepth 1 -user "$USER" \( -name 'vllm-*' -o -name 'psm_*' -o -name 'torch-*' \
    -o -name 'torchelastic_*' -o -name "stagecoach-$(id -u)" \) -exec rm -rf {} + 2>/dev/null

echo "$(hostname): $(left | wc -w) processes left"
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv,noheader
fi
exit 0
