# A trainer that is killed while the storage hangs, or takes no write, goes on from memory without it.
set -eu
if ! { truncate -s 256M image && mkfs.ext4 -q -F image && mkdir m && mount -o loop image m; } 2> /dev/null
then
    echo "skipped: no right to mount a file system"; exit 77
fi
trap 'fsfreeze -u m 2> /dev/null || true; umount -l m' EXIT
mkdir m/c
cat > job.py <<'P'
import hashlib, os, sys, time
import torch, autockpt

torch.manual_seed(5)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
with open("pid.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.tmp", "pid")
for step in ckpt.steps(1000):
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if os.path.exists("slow"):
        time.sleep(0.05 if step < 900 else 1.0)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("digest", digest.hexdigest())
P
wait_for() {
    said=$1; shift
    for i in $(seq 1000); do if "$@" > seen 2>&1; then return; fi; sleep 0.1; done
    echo "expected $said within 100 s; saw:"; cat out; exit 1
}
committed() { ls m/c/*/COMMIT; }
in_memory() { grep -c MemoryCommitted r/telemetry/keeper-000.jsonl; }
on_disk() { grep -c CheckpointDurable r/telemetry/keeper-000.jsonl; }
further() { [ "$($1)" -ge "$2" ]; }
resumed() { [ "$(grep -c 'resumed step [0-9]* from memory' out)" -ge "$1" ]; }
kill_trainer() {  # $1: how many times this makes
    wait_for "the trainer" test -e pid
    before=$(in_memory)
    wait_for "two more checkpoints in memory" further in_memory $((before + 2))
    trainer=$(cat pid); rm pid
    killed_s=$(date +%s)
    kill -9 "$trainer"
    wait_for "restart $1 from memory" resumed "$1"
    echo "restart $1 took $(($(date +%s) - killed_s)) s"
    before=$(in_memory)
    wait_for "five more checkpoints in memory" further in_memory $((before + 5))
}
autockpt run --no-profile --set 'memory.interval=1 steps' --set 'disk.interval=3 steps' \
    --set retune=false --set "disk.path=$PWD/undisturbed" --run-dir u job.py > plain 2>&1
touch slow; rm pid
autockpt run --no-profile --set 'memory.interval=1 steps' --set 'disk.interval=3 steps' \
    --set retune=false --set "disk.path=$PWD/m/c" --run-dir r job.py > out 2>&1 & launcher=$!
wait_for "a first commit" committed
fsfreeze -f m
kill_trainer 1
kill_trainer 2
durable=$(on_disk)
fsfreeze -u m
wait_for "a checkpoint on disk again" further on_disk $((durable + 1))
mount -o remount,ro m
kill_trainer 3
durable=$(on_disk)
mount -o remount,rw m
wait_for "a checkpoint on disk again" further on_disk $((durable + 1))
kill_trainer 4
rm slow
wait $launcher || { echo "expected exit code 0"; cat out; exit 1; }
autockpt verify r > verified 2>&1 || { echo "expected sound checkpoints"; cat verified; exit 1; }
expected=$(grep digest plain); [ "$expected" ]
[ "$(grep digest out)" = "$expected" ] || { echo "expected $expected; saw:"; cat out; exit 1; }
