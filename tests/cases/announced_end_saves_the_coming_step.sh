#!/bin/sh
# SIGTERM between two planned checkpoints saves the coming step: the next start loses nothing.
set -eu
cat > job.py <<'E'
import os, time, torch, autockpt
m = torch.nn.Linear(64, 64); o = torch.optim.AdamW(m.parameters()); c = autockpt.attach(model=m, optimizer=o)
print("from step", c.step_count, flush=True)
for s in c.steps(100000):
    m(torch.randn(8, 64)).sum().backward(); o.step(); time.sleep(0.02)
    open("at.tmp", "w").write(str(s + 1)); os.replace("at.tmp", "at")
E
expected=0
for round in 1 2; do
  rm -f at
  autockpt run --no-profile --set 'memory.interval=100000 steps' --set 'disk.interval=100000 steps' \
    --set retune=false --run-dir r job.py > out 2>&1 &
  launcher=$!
  tries=0
  until [ -s at ] && [ "$(cat at)" -ge $((expected + 50)) ]; do
    tries=$((tries + 1)); [ $tries -lt 1200 ] || { cat out; echo "the job did not get going"; exit 1; }
    kill -0 $launcher || { cat out; exit 1; }
    sleep 0.1
  done
  before=$(cat at)
  kill $launcher
  code=0; wait $launcher || code=$?
  [ $code -eq 143 ] || { cat out; echo "expected exit code 143, got $code"; exit 1; }
  began=$(sed -n 's/^from step //p' out)
  [ "$began" -ge $expected ] || { cat out; echo "expected a start at step $expected or later, got $began"; exit 1; }
  expected=$before
done
