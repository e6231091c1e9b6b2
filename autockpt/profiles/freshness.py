"""Does a profile fit this job on this machine?  A comparison of fingerprints, field by field."""

from dataclasses import fields

from autockpt.values.profile import Fingerprint


def mismatches(measured: Fingerprint, now: Fingerprint) -> list[str]:
    """A phrase for each field that differs, [] when the profile fits."""
    return [
        f"{field.name} {_shown(getattr(measured, field.name))}, "
        f"this job has {_shown(getattr(now, field.name))}"
        for field in fields(Fingerprint)
        if getattr(measured, field.name) != getattr(now, field.name)
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
