#!/bin/sh
# `autockpt verify --all` beside a live run calls nothing damaged that retention deletes meanwhile.
set -eu
cat > job.py <<'P'
import time, torch, autockpt
model = torch.nn.Linear(700, 700)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer, data="script")
for step in ckpt.steps(100000):
    model(torch.randn(2, 700)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
P
autockpt run -q --no-profile --set 'disk.interval=2 steps' --set 'memory.interval=2 steps' \
  --run-dir r job.py > run.txt 2>&1 &
deadline=$(($(date +%s) + 120))
until ls r/checkpoints/ckpt-*/COMMIT > /dev/null 2>&1; do
  [ "$(date +%s)" -lt $deadline ] || { cat run.txt; echo "no checkpoint within 120 s"; exit 1; }
  sleep 0.2
done
for try in 1 2 3 4 5; do
  code=0
  autockpt verify --all r > out.txt 2>&1 || code=$?
  if [ $code -ne 0 ] || grep -q DAMAGED out.txt; then
    cat out.txt; echo "expected exit code 0 and nothing damaged, got exit code $code"; exit 1
  fi
done
