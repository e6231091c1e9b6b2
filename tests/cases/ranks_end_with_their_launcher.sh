#!/bin/sh
# SIGKILL of the launcher ends its ranks within 60 s, and a start beside live ranks is refused for good.
set -eu
cat > job.py <<'E'
import os, time, torch, autockpt
m = torch.nn.Linear(64, 64); o = torch.optim.AdamW(m.parameters()); c = autockpt.attach(model=m, optimizer=o)
open("pid.tmp", "w").write(f"{os.getpid()}\n"); os.replace("pid.tmp", "pid")
for s in c.steps(100000): m(torch.randn(8, 64)).sum().backward(); o.step(); time.sleep(0.02)
E
gone() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }
autockpt run -q --no-profile --set 'disk.interval=20 steps' --run-dir r job.py &
launcher=$!
tries=0
until ls r/checkpoints/ckpt-*/COMMIT > /dev/null 2>&1; do
  tries=$((tries + 1)); [ $tries -lt 1200 ] || { echo "no checkpoint was made"; exit 1; }
  sleep 0.1
done
rank=$(cat pid)
# A start beside the live ranks, as another launcher that does not know of the first one.
rm -f pid
code=0
AUTOCKPT_RUN_DIR=$PWD/r AUTOCKPT_NO_PROFILE=1 python job.py > out 2>&1 || code=$?
[ $code -ne 0 ] || { cat out; echo "expected a refusal"; exit 1; }
kill -9 $launcher; wait $launcher 2> /dev/null || true
tries=0
until gone "$rank"; do
  tries=$((tries + 1)); [ $tries -lt 600 ] || { echo "rank $rank still trains after 60 s"; exit 1; }
  sleep 0.1
done
code=0
timeout 120 autockpt run --no-profile --set 'disk.interval=20 steps' --run-dir r job.py > out 2>&1 &
next=$!
tries=0
until [ -s pid ]; do
  tries=$((tries + 1)); [ $tries -lt 1200 ] || { cat out; echo "the next start did not get going"; exit 1; }
  kill -0 $next || { cat out; exit 1; }
  sleep 0.1
done
grep -q "resumed step" out || { cat out; echo "expected a resumed run"; exit 1; }
kill $next; wait $next || true
