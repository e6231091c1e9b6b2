# A machine lost before anything was durable: the next start begins at step 0, says why, and trains.
set -eu
cat > job.py <<'P'
import os, time
import torch, autockpt

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
print("trains from step", ckpt.step_count, flush=True)
for step in ckpt.steps(100000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    with open("pids.new", "w") as file:
        file.write(f"{os.getpid()} {ckpt.keeper_pid} {step + 1}\n")
    os.replace("pids.new", "pids")
    if os.path.exists("enough"):
        break
P
wait_for() {
    said=$1; shift
    for i in $(seq 1000); do if "$@" > seen 2>&1; then return; fi; sleep 0.1; done
    echo "expected $said within 100 s; saw:"; cat out; exit 1
}
reached() { read -r trainer keeper step < pids && [ "$step" -gt 30 ]; }
start() { autockpt run --no-profile --set retune=false --set 'memory.interval=5 steps' \
    --set 'disk.interval=1000 steps' --run-dir r job.py > out 2>&1 & pid=$!; }
start
wait_for "30 steps" reached
if ! ls r/checkpoints/ckpt-*/COMMIT > seen 2>&1; then
    echo "expected the first checkpoint on disk early"; ls r/checkpoints; exit 1
fi
read -r trainer keeper step < pids
kill -9 $pid $trainer $keeper
rm -rf pids r/checkpoints/ckpt-* r/checkpoints/EVER  # as if nothing had been durable yet
start
wait_for "the next start to train" reached
if ! grep -q "begins at step 0: an earlier start left no durable checkpoint" out; then
    echo "expected a word on why it begins at step 0"; cat out; exit 1
fi
touch enough
wait $pid || { echo "expected exit code 0"; cat out; exit 1; }
