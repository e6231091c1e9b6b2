"""The tensors that a skeleton refers to by name.  Read without torch: the keeper has none."""

from typing import Any

MARKS = ("$tensor", "$device_tensor")
"""Key of the object that stands for a tensor; the second for one that lived on an accelerator."""


def tensor_names(skeleton: Any) -> list[str]:
    """Names of the tensors that a skeleton refers to, in order."""
    if isinstance(skeleton, list):
        return [name for item in skeleton for name in tensor_names(item)]
    if isinstance(skeleton, dict):
        for mark in MARKS:
            if set(skeleton) == {mark}:
                return [skeleton[mark]]
        return [name for item in skeleton.values() for name in tensor_names(item)]
    return []
