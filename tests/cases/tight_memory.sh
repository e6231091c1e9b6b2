# In a memory cgroup without room for all slots, checkpoints are made all the same, and a later run resumes.
set -eu
v1=/sys/fs/cgroup/memory
v2=/sys/fs/cgroup
if [ -f "$v1/memory.limit_in_bytes" ]; then group=$v1/case-$$ limit=memory.limit_in_bytes
elif [ -f "$v2/cgroup.controllers" ]; then group=$v2/case-$$ limit=memory.max
else echo "skipped: no memory cgroups here"; exit 77; fi
mkdir "$group" 2> mkdir.err || { echo "skipped: needs root to make a cgroup"; exit 77; }
leave() { for left in $(cat "$group/cgroup.procs"); do kill -9 "$left" 2> kill.err || true; done
  tries=0; until rmdir "$group" 2> rmdir.err || [ $tries -ge 200 ]; do tries=$((tries + 1)); sleep 0.05; done; }
trap leave EXIT
[ -f "$group/$limit" ] || { echo "skipped: the memory controller is off"; exit 77; }
cat > job.py <<'P'
import os
from pathlib import Path
import torch, autockpt
group, left, steps = Path(os.environ["GROUP"]), int(os.environ["LEFT"]), int(os.environ["STEPS"])
def tighten():  # so that as much is left as the case wants, whatever torch takes on this machine
    v1 = (group / "memory.limit_in_bytes").exists()
    usage, cache = ("memory.usage_in_bytes", "total_inactive_file") if v1 else ("memory.current", "inactive_file")
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage).read_text()) - int(stat[cache])
    (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(used + left))
torch.set_num_threads(1)
model = torch.nn.Linear(3000, 3000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
grads = [torch.full_like(p, 1e-3) for p in model.parameters()]
ckpt = autockpt.attach(model=model, optimizer=optimizer)
print("begins at", ckpt.step_count, flush=True)
for number, step in enumerate(ckpt.steps(steps)):
    for parameter, grad in zip(model.parameters(), grads):
        parameter.grad = grad
    optimizer.step()
    if number == 0:
        tighten()
P
for left in 180000000 64000000; do  # room for one slot of three, and for none
  rm -rf run
  for steps in 16 24; do
    [ $steps = 16 ] || [ $left = 64000000 ] || continue
    echo 4294967296 > "$group/$limit"
    GROUP=$group LEFT=$left STEPS=$steps sh -c 'echo $$ > "$0/cgroup.procs"; exec "$@"' "$group" autockpt run --no-profile \
      --set disk.interval='4 steps' --run-dir run job.py > out 2>&1 ||
      { echo "$left bytes left: expected exit code 0"; cat out; exit 1; }
  done
  ls run/checkpoints/ckpt-*/COMMIT > made || { echo "$left bytes left: no checkpoint"; cat out; exit 1; }
  [ $left = 180000000 ] || grep -q "begins at 16" out || { echo "$left bytes left: expected a resume at step 16"; cat out; exit 1; }
done
