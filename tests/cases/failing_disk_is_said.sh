# A disk that turns read-only while a run trains is said at once, on the terminal and in status.json.
set -eu
mkdir -p r/checkpoints
if ! mount -t tmpfs -o size=64m tmpfs r/checkpoints 2> /dev/null; then
    echo "skipped: no right to mount a file system"; exit 77
fi
trap 'umount -l r/checkpoints' EXIT
cat > job.py <<'P'
import os, time
import torch, autockpt

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir="r")
for step in ckpt.steps(100000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step % 10 == 0:
        ckpt.save()
    if os.path.exists("enough"):
        break
P
wait_for() {
    said=$1; shift
    for i in $(seq 1000); do if "$@" > seen 2>&1; then return; fi; sleep 0.1; done
    echo "expected $said within 100 s; saw:"; cat out; cat r/status.json; exit 1
}
committed() { ls r/checkpoints/ckpt-*/COMMIT; }
autockpt run --no-profile --run-dir r job.py > out 2>&1 & pid=$!
wait_for "a first commit" committed
mount -o remount,ro r/checkpoints
wait_for "a word on the terminal" grep "no checkpoint reaches the disk.*Read-only" out
wait_for "the state of the disk in status.json" grep '"tier": "disk"' r/status.json
grep -q '"state": "running"' r/status.json || { echo "expected a running state"; cat r/status.json; exit 1; }
mount -o remount,rw r/checkpoints
wait_for "the end of it on the terminal" grep "checkpoints reach the disk again" out
touch enough
wait $pid || { echo "expected exit code 0"; cat out; exit 1; }
