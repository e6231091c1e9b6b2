"""A trainer without a training: a process that says hello and fills slots when it is told to.

`python -m tests.unit.executors.bare_trainer RUN LAUNCH ROUND LAUNCHER`: reads orders from its
standard input, one a line, and answers each with a line of JSON.  `BareTrainer` is the test's
end of it.
"""

import contextlib
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import time
from typing import Any

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.client import KeeperClient
from autockpt.executors.keeper.saving.boundary_record import record_bytes
from autockpt.executors.keeper.slots import CELL_COPIED, MAX_SLOTS
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.values.generation import Generation

PATIENCE_S = 30.0
IMAGE_BYTES, CHUNK_BYTES, HEAD_BYTES = 2**20, 2**18, 4096


class BareTrainer:
    """The process, as a test sees it."""

    def __init__(self, run_dir: str, launch: str, restart_round: int, launcher: int) -> None:
        """`launcher`: the process that is said to have started it."""
        command = [
            sys.executable, "-m", __name__, run_dir, launch, str(restart_round), str(launcher)
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self._worker = 0

    def attach(self) -> dict[str, Any]:
        """How it was received: `refusal`, empty when it goes on, and what it restored."""
        return self.tell("attach")

    def save(self, step: int, fill: int) -> dict[str, Any]:
        """A checkpoint full of one number, streamed to disk: `skipped`, or `stored` numbers."""
        began = self.tell("begin", step)
        return began if began["skipped"] else self.tell("copy", step, fill)

    def tell(self, *order: object) -> dict[str, Any]:
        """Gives an order and waits for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, order)).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, f"no answer to {order}"
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def fork(self) -> None:
        """It gets a child that does nothing, like an idle worker of a DataLoader."""
        self._worker = int(self.tell("fork")["pid"])

    def stop(self) -> None:
        """It lives, and does nothing more."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Its child lives on."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def end(self) -> None:
        """Nothing of it survives."""
        if self._worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker, signal.SIGKILL)
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class _Trainer:
    """In the process."""

    def __init__(self, run_dir: str, launch: str, restart_round: int, launcher: int) -> None:
        self._checkpoints = os.path.join(run_dir, "checkpoints")
        incarnation = p.Incarnation(launch_id=launch, restart_round=restart_round)
        attach = p.TrainerAttached(
            rank=0, incarnation=incarnation, world_size=1, nodes=(0,), slots=0
        )
        self._link = KeeperClient(
            run_dir, 0, checkpoints=self._checkpoints, attach=attach, launcher_pid=launcher,
            awaits=launcher != os.getppid(),
        )  # fmt: skip
        # By its board every slot is full, until it begins one: a keeper must not go by that.
        cells = self._link.board.view.cast("Q")
        cells[CELL_COPIED : CELL_COPIED + MAX_SLOTS] = memoryview(
            struct.pack(f"{MAX_SLOTS}Q", *[IMAGE_BYTES] * MAX_SLOTS)
        ).cast("Q")
        self._term = self._attempt = 0
        self._slots: dict[int, int] = {}
        """By number of the save that is under way."""

    def record(self) -> dict[str, Any]:
        """It shows with its hello where it records its boundaries."""
        self._link.give_records([Arena.create_sparse(record_bytes(4096), name="record")])
        return {}

    def attach(self) -> dict[str, Any]:
        """Says hello, restores without looking, asks for two slots."""
        self._link.open()
        restored = ""
        while True:
            try:
                order = self._link.restore_orders.get(timeout=PATIENCE_S)
            except queue.Empty:
                return {"refusal": "no answer"}
            if isinstance(order, p.RestoreShard):
                restored = str(order.generation)
                done = p.ShardVerified(rank=0, term=order.term, attempt=order.attempt)
                self._link.send(done)
            elif isinstance(order, p.Resume | p.StartFresh):
                break
            else:
                return {"refusal": order.reason}
        self._term = order.term
        self._attempt = order.attempt if isinstance(order, p.Resume) else 0
        self._link.running_as(self._term, 0, None, attempt=self._attempt)
        if not self._link.slots:
            self._link.want_slots(
                image_bytes=IMAGE_BYTES, chunk_bytes=CHUNK_BYTES, slots=2, limit_bytes=None
            )
        assert self._link.wait_until(lambda: bool(self._link.slots), PATIENCE_S)
        return {"refusal": "", "restored": restored}

    def _generation(self, step: int) -> Generation:
        return Generation(term=self._term, attempt=self._attempt, step=step)

    def begin(self, step: int) -> dict[str, Any]:
        """A snapshot of which nothing is copied yet."""
        link, generation = self._link, self._generation(step)
        save = link.ask(generation, disk=True)
        link.wait_until(lambda: save.is_answered, PATIENCE_S)
        slot = link.saves.begin(save, disk=True)
        if slot is None:
            return {"skipped": save.reason or "no answer"}
        self._slots[step] = slot
        link.board.view.cast("Q")[CELL_COPIED + slot] = 0
        link.send(
            wire.SnapshotBegan(
                rank=0, generation=generation, step=step, slot=slot, image_bytes=IMAGE_BYTES,
                boundary_end=HEAD_BYTES, layout_digest="layout", writers=2,
                chunk_bytes=CHUNK_BYTES, direct_io=False, streaming=True, codec="none",
                at_s=time.monotonic(),
            )
        )  # fmt: skip
        return {"skipped": ""}

    def copy(self, step: int, fill: int) -> dict[str, Any]:
        """The rest of it, in pieces that the keeper can follow; then what its file holds."""
        link, generation = self._link, self._generation(step)
        slot = self._slots[step]
        view, copied = link.slots[slot].view, link.board.view.cast("Q")
        time.sleep(0.1)  # whoever follows another board is done by now
        view[:HEAD_BYTES] = _header()
        view[HEAD_BYTES:IMAGE_BYTES] = bytes([fill]) * (IMAGE_BYTES - HEAD_BYTES)
        for end in range(CHUNK_BYTES, IMAGE_BYTES + 1, CHUNK_BYTES):
            copied[CELL_COPIED + slot] = end
        link.send(wire.SnapshotCopied(rank=0, generation=generation))
        link.wait_over(generation, PATIENCE_S)
        if not link.saves.is_durable(generation):
            return {"skipped": link.saves.discard_reason(generation) or "no answer"}
        path = os.path.join(self._checkpoints, generation.name, "shard-00000-a1.safetensors")
        with open(path, "rb") as file:
            stored = file.read()[HEAD_BYTES:]
        return {"skipped": "", "stored": sorted(set(stored))}

    def leave(self, step: int, interrupted: int) -> dict[str, Any]:
        """The end of its training, with a word about it."""
        reason = "signal" if interrupted else "finished"
        self._link.send(wire.TrainerLeaving(rank=0, step=step, reason=reason, note="a word"))
        self._link.close()
        return {}

    def fork(self) -> dict[str, Any]:
        """A child that holds what we hold, for a while."""
        pid = os.fork()
        if not pid:
            os.closerange(0, 3)  # nobody waits for its words
            time.sleep(2 * PATIENCE_S)
            os._exit(0)
        return {"pid": pid}


def _header() -> bytes:
    """Of an image that is one tensor."""
    room = IMAGE_BYTES - HEAD_BYTES
    tensor = {"dtype": "U8", "shape": [room], "data_offsets": [0, room]}
    text = json.dumps({"x": tensor}).encode()
    return struct.pack("<Q", HEAD_BYTES - 8) + text.ljust(HEAD_BYTES - 8)


def main() -> None:
    """Orders in, answers out."""
    run_dir, launch, restart_round, launcher = sys.argv[1:]
    trainer = _Trainer(run_dir, launch, int(restart_round), int(launcher))
    for line in sys.stdin:
        name, *numbers = line.split()
        answer = getattr(trainer, name)(*map(int, numbers))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
