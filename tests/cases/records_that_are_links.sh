#!/bin/sh
# A record that is a link is damage: `verify --with-records` names it and exits with 65.
set -eu
cat > job.py <<'P'
import torch, autockpt
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir="r", data="script")
for step in ckpt.steps(3):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
P
AUTOCKPT_NO_PROFILE=1 python job.py
for record in RUN terms/t-000001 decisions/t-000001; do
  mv r/checkpoints/$record kept
  ln -s /etc/passwd r/checkpoints/$record
  code=0
  autockpt verify --with-records r/checkpoints > out.txt 2>&1 || code=$?
  if [ $code -ne 65 ] || ! grep -q "DAMAGED .*$record" out.txt || grep -q root: out.txt; then
    cat out.txt; echo "$record: expected exit code 65 and its name, got exit code $code"; exit 1
  fi
  rm r/checkpoints/$record
  mv kept r/checkpoints/$record
done
autockpt verify --with-records r/checkpoints
