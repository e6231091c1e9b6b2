# A checkpoint directory that is emptied while a run trains does not end it, and is made again.
set -eu
cat > job.py <<'P'
import os, time
import torch, autockpt

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir="r")
for step in ckpt.steps(100000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if os.path.exists("enough"):
        break
print("SCRIPT ENDED", flush=True)
P
wait_for() {  # a description, then a command that is tried for 100 s
    said=$1; shift
    for i in $(seq 1000); do if "$@" > seen 2>&1; then return; fi; sleep 0.1; done
    echo "expected $said within 100 s; saw:"; cat out; exit 1
}
committed() { ls r/checkpoints/ckpt-*/COMMIT; }
for how in python run; do
    rm -rf r enough
    if [ $how = python ]; then
        AUTOCKPT_NO_PROFILE=1 python job.py > out 2>&1 &
    else
        autockpt run --no-profile --set 'disk.interval=5 steps' --set 'memory.interval=5 steps' \
            --run-dir r job.py > out 2>&1 &
    fi
    pid=$!
    wait_for "a first commit ($how)" committed
    mv r/checkpoints r/away; mkdir r/checkpoints
    wait_for "a commit in the directory that was emptied ($how)" committed
    touch enough
    code=0; wait $pid || code=$?
    if [ $code != 0 ]; then echo "$how: expected exit code 0, got $code"; cat out; exit 1; fi
    if ! grep -q "SCRIPT ENDED" out; then echo "$how: the script did not end"; cat out; exit 1; fi
    if ! grep -q "emptied" out; then echo "$how: nothing was said"; cat out; exit 1; fi
done
