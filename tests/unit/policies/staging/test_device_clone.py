"""The clone on the device: where it fits and saves something; without a device, nothing."""

from dataclasses import replace

import pytest

from autockpt.policies.decide import decide
from autockpt.policies.staging.device_clone import choose_device_clone
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Pins
from autockpt.values.profile import LinkMeasure, Profile
from tests.support.profiles import STATE_BYTES, distribution, example_profile


def on_a_gpu(*, free_bytes: int | None, bytes_per_s: float) -> Profile:
    """The example on a device whose link to the host has this speed."""
    link = LinkMeasure(
        link="device_to_host_pinned", alpha_s=1e-4, bytes_per_s=bytes_per_s, relative_spread=0.02,
        n=9,
    )  # fmt: skip
    profile = example_profile(links=(link,))
    return replace(
        profile,
        fingerprint=replace(profile.fingerprint, gpus=("example-gpu",)),
        memory=replace(profile.memory, device_available_bytes=free_bytes),
        phases_s={
            **profile.phases_s,
            "forward": distribution(0.01),
            "backward": distribution(0.02),
        },
    )


@pytest.mark.parametrize(
    ("free_bytes", "bytes_per_s", "chosen"),
    [
        (2 * STATE_BYTES, 10e9, "on"),
        (int(1.2 * STATE_BYTES), 10e9, "off"),  # more than 80 % of what is free
        (2 * STATE_BYTES, 100e9, "off"),  # 7 ms are hidden by 30 ms of forward and backward
        (None, 10e9, "auto"),
    ],
)
def test_a_clone_is_taken_where_it_fits_and_the_copy_is_exposed(
    free_bytes: int | None, bytes_per_s: float, chosen: str
) -> None:
    """CheckFreq's two conditions, from measured memory, link and phases."""
    profile = on_a_gpu(free_bytes=free_bytes, bytes_per_s=bytes_per_s)
    choice = choose_device_clone(profile, Goal())
    assert choice.chosen == chosen
    assert choice.reason


def test_the_reason_has_the_numbers() -> None:
    """72 ms of copy behind 30 ms of computation."""
    profile = on_a_gpu(free_bytes=2 * STATE_BYTES, bytes_per_s=10e9)
    choice = choose_device_clone(profile, Goal())
    assert choice.numbers["device_free_bytes"] == 2 * STATE_BYTES
    assert choice.numbers["exposed_copy_s"] == pytest.approx(0.0421, abs=1e-4)
    staging = decide(profile, Goal()).choice("staging")
    assert staging is not None
    assert "cloned on the device" in staging.chosen
    assert staging.numbers["exposed_copy_s"] == choice.numbers["exposed_copy_s"]


def test_a_pinned_clone_that_does_not_fit_is_refused() -> None:
    """With the bytes and the way out."""
    profile = on_a_gpu(free_bytes=STATE_BYTES, bytes_per_s=10e9)
    refused = r"720000000 bytes .* 576000000 .*nearest: staging\.device_clone: off"
    with pytest.raises(ConfigError, match=refused):
        choose_device_clone(profile, Goal(pins=Pins(device_clone="on")))
    assert choose_device_clone(profile, Goal(pins=Pins(device_clone="off"))).chosen == "off"


@pytest.mark.parametrize("pin", [None, "on", "off"])
def test_without_a_device_the_clone_changes_nothing_but_its_own_word(pin: str | None) -> None:
    """Same plan, same promise, whatever is pinned."""
    goal = Goal(pins=Pins(device_clone=pin))  # type: ignore[arg-type]
    plain, pinned = decide(example_profile(), Goal()), decide(example_profile(), goal)
    assert pinned.expected == plain.expected
    assert replace(pinned.plan.staging, device_clone="off") == plain.plan.staging
    assert pinned.plan.staging.device_clone == (pin or "off")
