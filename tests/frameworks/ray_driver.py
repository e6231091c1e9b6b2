"""A TorchTrainer over the samples of the contract; Ray starts the workers, here and again."""

import json
import os
import sys
import tempfile
import time
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

from tests.contracts.adapter_process import (
    BATCH,
    EPOCHS,
    OWN_EVERY,
    Case,
    Model,
    Samples,
    Watch,
    seed,
)  # fmt: skip


def loop(config: dict[str, Any]) -> None:
    """In each worker, as Ray's documentation shows it."""
    case, how = Case(**config["case"]), config["how"]
    torch.set_num_threads(1)
    watch = Watch(case, config["folder"], how)
    seed()
    data = Samples(case)
    model = prepare_model(Model(watch))
    inner = getattr(model, "module", model)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = prepare_data_loader(
        DataLoader(
            data,
            batch_size=BATCH,
            shuffle=True,
            num_workers=case.workers,
            persistent_workers=case.persistent,
        )
    )
    evaluation = DataLoader(data, batch_size=BATCH)
    length, losses = len(loader), list[float]()
    watch.follow(lambda: {"model": inner, "optimizer": optimizer, "scheduler": scheduler})

    def train(number: int, batch: Any) -> None:
        """Micro-batch `number`, from 0."""
        ends_window = (number + 1) % case.accumulation == 0
        loss = model(**batch)["loss"]
        (loss / case.accumulation).backward()
        if not ends_window:
            return
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done = (number + 1) // case.accumulation
        if case.evaluate_every and done % case.evaluate_every == 0:
            with torch.no_grad():
                losses.extend(float(inner(**each)["loss"]) for each in evaluation)

    if how == "protected":
        _protected(config, model, optimizer, scheduler, loader, train, watch)
    else:
        _bare(loader, length, train, inner, optimizer, scheduler, how)
    watch.end()


def _protected(
    config: dict[str, Any], model: Any, optimizer: Any, scheduler: Any, loader: Any, train: Any,
    watch: Watch,
) -> None:  # fmt: skip
    from autockpt.integrations import ray as adapter
    from autockpt.policies.policy_file.layers import with_settings
    from autockpt.values.goal import Goal
    from tests.contracts.adapter_contract import PLAN

    case = Case(**config["case"])
    rare = (*PLAN, "disk.interval=100000 steps") if case.option in ("preempted", "peers") else PLAN
    if case.option == "peers":
        rare = (*rare, "redundancy.scheme=replicas", "redundancy.copies=2")
    ckpt = adapter.attach(
        model=model, optimizer=optimizer, scheduler=scheduler, data=loader,
        goal=with_settings(Goal(), rare),
    )  # fmt: skip
    if case.option in ("elastic", "epochs"):
        _epochs(ckpt, loader, train, watch)
        return
    preempted = case.option == "preempted"
    length = len(loader)
    is_first = True
    for number, batch in ckpt.batches(EPOCHS * length * (10 if preempted else 1)):
        time.sleep(0.1 * preempted)
        if not is_first:  # a boundary is over
            watch.passed(ckpt.session, number)
        is_first = False
        train(number, batch)
        if (number + 1) % OWN_EVERY == 0:
            ckpt.report({"number": number})


def _epochs(ckpt: Any, loader: Any, train: Any, watch: Watch) -> None:
    """The number of batches in an epoch depends on that of the workers."""
    for epoch in range(ckpt.epoch, EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for index, batch in enumerate(loader, ckpt.first_batch):
            number = epoch * len(loader) + index
            train(number if watch.case.option == "epochs" else ckpt.step_count, batch)
            ckpt.step()
    ckpt.close()


def _bare(
    loader: Any, length: int, train: Any, model: Any, optimizer: Any, scheduler: Any, how: str
) -> None:
    """Ray's own way: what is reported is loaded, and the batches before it are skipped."""
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", weights_only=True)
        first = saved.pop("done")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    for epoch in range(first // length, EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            number = epoch * length + index
            if number < first:
                continue
            train(number, batch)
            if how != "own" or (number + 1) % OWN_EVERY:
                continue
            with tempfile.TemporaryDirectory() as folder:
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**state, "done": number + 1}, f"{folder}/state.pt")
                own = Checkpoint.from_directory(folder)
                first_rank = ray.train.get_context().get_world_rank() == 0
                ray.train.report({"number": number}, checkpoint=own if first_rank else None)


def main() -> None:
    """`python ray_driver.py FOLDER HOW CASE`."""
    folder, how, text = sys.argv[1:4]
    case = json.loads(text)
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=True)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"case": case, "how": how, "folder": folder},
        scaling_config=ScalingConfig(
            num_workers=(1, 2) if case["option"] == "elastic" else case["ranks"], use_gpu=False,
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name="contract", storage_path=_storage(folder, case),
            failure_config=FailureConfig(max_failures=2 if case["kill"] else 0),
        ),
    )  # fmt: skip
    result = trainer.fit()
    if case["option"] == "store":
        from autockpt.integrations import ray as adapter

        print("located", adapter.located(result.checkpoint), flush=True)
    ray.shutdown()


def _storage(folder: str, case: dict[str, Any]) -> str:
    """Of the experiment."""
    return f"s3://bucket{folder}" if case["option"] == "store" else f"{folder}/store"


if __name__ == "__main__":
    main()
