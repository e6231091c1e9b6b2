"""Averages, other models and scalers that the user has forgotten to attach."""

import copy
import sys

import torch

from autockpt.session.place.script.unattached import UnattachedState


def test_what_changes_and_is_not_attached_is_named_once() -> None:
    """A frozen teacher, a wrapper of the model, and a scaler that is off are not."""
    model = torch.nn.Linear(2, 2)
    compiled = torch.nn.Sequential(model)
    ema = torch.optim.swa_utils.AveragedModel(model)
    teacher, off = copy.deepcopy(model), torch.amp.GradScaler("cpu", enabled=False)
    held = {"critics": [torch.nn.Linear(2, 1)]}
    found = []
    unattached, every = UnattachedState(), (compiled, teacher, off)
    for n in range(4):
        found.append(unattached.look(sys._getframe(), [model]))
        if n == 1:
            ema.update_parameters(model)
        if n == 2:
            held["critics"][0].weight.data = torch.ones(1, 2)
    assert len(every) == 3
    assert found == [
        "", "",
        "ema (AveragedModel) changes in the training and is not attached, so a restart begins it "
        "anew; add it: autockpt.attach(..., ema=ema)",
        "held.critics.0 (Linear) changes in the training and is not attached, so a restart begins "
        "it anew; add it: autockpt.attach(..., critics=held.critics.0)",
    ]  # fmt: skip


def test_a_scaler_is_named_at_once_unless_it_is_attached() -> None:
    """Its scale is a part of the training's state; so is what an attached object holds."""
    scaler = torch.amp.GradScaler("cpu")
    text = UnattachedState().look(sys._getframe(), [])
    assert text.startswith("scaler (GradScaler) changes in the training and is not attached")

    class Held:
        def __init__(self) -> None:
            self.scaler = scaler

    assert UnattachedState().look(sys._getframe(), [Held()]) == ""
    assert UnattachedState().look(sys._getframe(), [scaler]) == ""
