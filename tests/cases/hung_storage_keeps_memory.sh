# While the storage hangs, checkpoints in memory go on; afterwards the disk has them again.
set -eu
if ! { truncate -s 256M image && mkfs.ext4 -q -F image && mkdir m && mount -o loop image m; } 2> /dev/null
then
    echo "skipped: no right to mount a file system"; exit 77
fi
trap 'fsfreeze -u m 2> /dev/null || true; umount -l m' EXIT
mkdir m/c
cat > job.py <<'P'
import os, time
import torch, autockpt

model = torch.nn.Linear(700, 700)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(100000):
    model(torch.randn(2, 700)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if os.path.exists("enough"):
        break
P
wait_for() {
    said=$1; shift
    for i in $(seq 1000); do if "$@" > seen 2>&1; then return; fi; sleep 0.1; done
    echo "expected $said within 100 s; saw:"; cat out; exit 1
}
committed() { ls m/c/ckpt-*/COMMIT; }
in_memory() { grep -c MemoryCommitted r/telemetry/keeper-000.jsonl; }
on_disk() { grep -c CheckpointDurable r/telemetry/keeper-000.jsonl; }
further() { [ "$($1)" -ge "$2" ]; }
autockpt run --no-profile --set 'memory.interval=1 steps' --set 'disk.interval=3 steps' \
    --set retune=false --set "disk.path=$PWD/m/c" --run-dir r job.py > out 2>&1 & pid=$!
wait_for "a first commit" committed
fsfreeze -f m
before=$(in_memory)
wait_for "40 more checkpoints in memory" further in_memory $((before + 40))
wait_for "a word on the terminal" grep "the storage hangs" out
before=$(in_memory)
wait_for "40 more after that" further in_memory $((before + 40))
durable=$(on_disk)
fsfreeze -u m
wait_for "a checkpoint on disk again" further on_disk $((durable + 1))
touch enough
wait $pid || { echo "expected exit code 0"; cat out; exit 1; }
