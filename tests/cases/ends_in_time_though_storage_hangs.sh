#!/bin/sh
# Storage that hangs keeps `autockpt run` no longer than it announces (fsfreeze of a loop device, root).
set -eu
[ "$(id -u)" = 0 ] || { echo "skipped: needs root"; exit 77; }
truncate -s 256M img; mkfs.ext4 -q -F img || { echo "skipped: no mkfs.ext4"; exit 77; }
mkdir m; mount -o loop img m 2> /dev/null || { echo "skipped: no loop device"; exit 77; }
trap 'fsfreeze -u m 2> /dev/null || true; umount -l m' EXIT
cat > job.py <<'E'
import os, time, torch, autockpt
m = torch.nn.Linear(300, 300); o = torch.optim.AdamW(m.parameters()); c = autockpt.attach(model=m, optimizer=o)
for s in c.steps(100000): m(torch.randn(2, 300)).sum().backward(); o.step(); o.zero_grad(); time.sleep(0.05)
E
autockpt run --no-profile --set 'memory.interval=1 steps' --set 'disk.interval=3 steps' --set retune=false \
  --set 'failures.preemption=1 h' --set 'failures.notice=20 s' --set "disk.path=$PWD/m/c" --run-dir r job.py > out 2>&1 &
launcher=$!
tries=0
until ls m/c/ckpt-*/COMMIT > /dev/null 2>&1; do
  tries=$((tries + 1)); [ $tries -lt 1200 ] || { cat out; echo "no checkpoint was made"; exit 1; }
  sleep 0.1
done
fsfreeze -f m
began=$(date +%s)
kill $launcher
code=0; wait $launcher || code=$?
took=$(($(date +%s) - began))
fsfreeze -u m
[ $code -eq 143 ] || { cat out; echo "expected exit code 143, got $code"; exit 1; }
[ $took -le 30 ] || { cat out; echo "expected an end within 20 s as announced, it took $took s"; exit 1; }
