"""A loop of DeepSpeed's engine over the samples of the contract, on the CPU."""

import importlib
import os
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.contracts.adapter_process import (
    BATCH,
    EPOCHS,
    OWN_EVERY,
    Case,
    Model,
    Samples,
    Watch,
    run,
    seed,
)  # fmt: skip


def warm() -> None:
    """Imports what reads the environment."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    deepspeed = importlib.import_module("deepspeed")
    # Else it compiles an operation for reductions in shared memory, in each environment anew.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _join(world_size: int) -> None:
    """The process group; of one rank without a port."""
    warm()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        place = os.path.join(tempfile.mkdtemp(), "store")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{place}", rank=0, world_size=1
        )


def _config(case: Case) -> dict[str, Any]:
    stage = int(case.option[-1]) if case.option.startswith("zero") else 2
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0, "steps_per_print": 1000,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if case.option == "bf16":
        config["bf16"] = {"enabled": True}
    if case.option == "fp16":
        config["fp16"] = {
            "enabled": True, "initial_scale_power": 17, "loss_scale_window": 3, "hysteresis": 1,
        }  # fmt: skip
    return config


def train(case: Case, watch: Watch, how: str) -> None:
    """As its documentation shows."""
    _join(case.ranks)
    import deepspeed  # it reads the environment
    from deepspeed.accelerator import get_accelerator

    if case.option == "fp16":  # CPUs can: DeepSpeed asks for fast ones
        type(get_accelerator()).is_fp16_supported = lambda _: True
    seed()
    data = Samples(case)
    model: Any = Model(watch)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=_config(case)
    )
    sampler: Any = DistributedSampler(data) if case.ranks > 1 else None
    loader: Any = DataLoader(
        data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler,
        num_workers=case.workers, persistent_workers=case.persistent,
    )  # fmt: skip
    evaluation = DataLoader(data, batch_size=BATCH)
    losses: list[float] = []
    kind = next(model.parameters()).dtype

    def parts() -> dict[str, Any]:
        masters = getattr(optimizer, "single_partition_of_fp32_groups", [])
        scaler = getattr(optimizer, "loss_scaler", None)
        counters = [engine.global_steps, engine.global_samples, engine.micro_steps]
        return {
            "model": engine.module, "optimizer": optimizer, "scheduler": scheduler,
            "masters": list(masters), "scaler": vars(scaler) if scaler else None,
            "counters": [*counters, engine.skipped_steps],
        }  # fmt: skip

    watch.follow(parts)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = engine(
            batch["x"].to(kind), labels=batch["labels"].to(kind), ids=batch["ids"]
        )["loss"]
        return loss

    def evaluate() -> None:
        with torch.no_grad():
            losses.extend(float(loss_of(batch)) for batch in evaluation)

    folder, first, skip = os.path.join(watch.folder, "own"), 0, 0
    ckpt: Any = None
    if how == "protected":
        import autockpt

        ckpt = autockpt.integrations.deepspeed.protect(engine)
        loader = ckpt.loader(loader)
        first = loader.epoch
    if how == "own" and os.path.exists(f"{folder}/latest"):
        engine.load_checkpoint(folder)
        first, skip = divmod(engine.global_steps * case.accumulation, len(loader))
    for epoch in range(first, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            if skip:
                skip -= 1
                continue
            loss = loss_of(batch)
            engine.backward(loss)
            ended = engine.is_gradient_accumulation_boundary()
            engine.step()
            done = engine.global_steps
            if ended and case.evaluate_every and done % case.evaluate_every == 0:
                evaluate()
            if how == "own" and ended and done % OWN_EVERY == 0:
                engine.save_checkpoint(folder)
        torch.rand(1)  # what a script does at the end of an epoch
    if ckpt is not None:
        ckpt.close()
    watch.end()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(train)
