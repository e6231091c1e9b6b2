# Under a umask of 0 nothing of a run may be written by another user, and goals and telemetry are private.
set -eu
umask 0
cat > job.py <<'P'
import torch, autockpt
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(40):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
P
autockpt run -q --no-profile --run-dir run job.py
open=$(find run -perm /0022 ! -type l)
if [ -n "$open" ]; then
  echo "expected nothing that group or others may write, got:"
  echo "$open"
  exit 1
fi
read=$(find run/goal.json run/telemetry -perm /0077 ! -type l)
if [ -n "$read" ]; then
  echo "expected goal and telemetry closed to others, got:"
  echo "$read"
  exit 1
fi
ls run/checkpoints/ckpt-*/COMMIT > checkpoints || { echo "expected a checkpoint, got none"; exit 1; }
