"""Moments as logs write them, in seconds since 1970; without a zone they are taken as UTC.

No clock is read: a year that is missing, as in syslog, is given by the caller.
"""

import calendar
import re

_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)([.,]\d+)?\s?(Z|[+-]\d\d:?\d\d)?")
_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}
_SYSLOG = re.compile(r"([A-Z][a-z]{2})\s+(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: (\d{4}))?")


def iso_s(text: str) -> float | None:
    """2026-01-31T12:00:00, with a fraction and a zone if there is one; None for anything else."""
    found = _ISO.match(text)
    if found is None:
        return None
    *numbers, fraction, zone = found.groups()
    at_s = _utc_s(*(int(number) for number in numbers))
    if at_s is None:
        return None
    return at_s + float(f"0.{fraction[1:]}" if fraction else 0) - _zone_s(zone)


def syslog_s(text: str, *, year: int) -> float | None:
    """Jan 31 12:00:00, with the year behind it where `dmesg -T` writes one; None otherwise."""
    found = _SYSLOG.match(text)
    if found is None or found[1] not in _MONTHS:
        return None
    day, hour, minute, second = (int(found[i]) for i in range(2, 6))
    return _utc_s(int(found[6] or year), _MONTHS[found[1]], day, hour, minute, second)


def _utc_s(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float | None:
    if not (1 <= month <= 12 and hour < 24 and minute < 60 and second <= 60 and year >= 1970):
        return None
    if not 1 <= day <= calendar.monthrange(year, month)[1]:
        return None
    return float(calendar.timegm((year, month, day, hour, minute, second)))


def _zone_s(zone: str | None) -> float:
    if zone in (None, "Z"):
        return 0.0
    assert zone is not None
    sign = -1.0 if zone[0] == "-" else 1.0
    return sign * (int(zone[1:3]) * 3600.0 + int(zone[-2:]) * 60.0)
