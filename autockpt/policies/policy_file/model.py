"""The shape of a policy file as pydantic models, and the Goal it makes.

Unknown keys are errors.  Every field defaults to None, which means `auto`.  The JSON schema gives
quantities a string pattern, so that an editor marks a missing unit.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, WithJsonSchema

from autockpt.policies.policy_file import fields
from autockpt.policies.policy_file.fields import Every, Money, guarded
from autockpt.values.goal import (
    Archiving,
    FailureDeclaration,
    Goal,
    Limits,
    Pins,
    Prices,
    RedundancyWish,
    RemoteWish,
    RestartWish,
    Retention,
    Retune,
)
from autockpt.values.redundancy import Arrangement, PeerPath, PeerSchedule, Scheme

VERSION = 1

_NUMBER = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_DURATION = rf"^({_NUMBER} *(us|ms|s|min|h|d) *)+$"
_SIZE = rf"^{_NUMBER} *([kKmMgGtT]i?)?[bB]$"
_RATE = rf"^{_NUMBER} *([kKmMgGtT]i?)?B/s$"
_STORAGE_PRICE = rf"^{_NUMBER} *[A-Z]{{3}} */ *[kKmMgGtT]i?[bB]-month$"
_HOURLY_PRICE = rf"^{_NUMBER} *[A-Z]{{3}} */ *h$"
_STEPS = r"^[0-9]+ *steps?$"
_PERCENT = rf"^{_NUMBER} *%$"
_CONDITION = r"\s*(>=|<=|==|>|<)?\s*([0-9]+)\s*"


def _patterns(*patterns: str) -> WithJsonSchema:
    strings = [{"type": "string", "pattern": pattern} for pattern in patterns]
    return WithJsonSchema({"anyOf": [{"const": "auto"}, *strings]})


def _words(*words: str) -> WithJsonSchema:
    return WithJsonSchema({"enum": ["auto", *words]})


def _counts(low: int, high: int) -> WithJsonSchema:
    count = {"type": "integer", "minimum": low, "maximum": high}
    return WithJsonSchema({"anyOf": [{"const": "auto"}, count]})


def _reader(read: Any) -> PlainValidator:
    return PlainValidator(guarded(read))


Interval = Annotated[Every | None, _reader(fields.read_interval), _patterns(_DURATION, _STEPS)]
Duration = Annotated[float | None, _reader(fields.read_duration_s), _patterns(_DURATION)]
Size = Annotated[int | None, _reader(fields.read_size_bytes), _patterns(_SIZE)]
Chunk = Annotated[int | None, _reader(fields.read_chunk_bytes), _patterns(_SIZE)]
Budget = Annotated[float | None, _reader(fields.read_budget), _patterns(_PERCENT)]
Share = Annotated[float | None, _reader(fields.read_share), _patterns(_PERCENT)]
Directory = Annotated[str | None, _reader(fields.read_path), _patterns("^.+$")]
StoreUrl = Annotated[
    str | None, _reader(fields.read_url), _patterns(f"^({'|'.join(fields.STORES)})://.+$")
]
Switch = Annotated[
    bool | None,
    _reader(fields.read_switch),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "boolean"}]}),
]
Retuning = Annotated[
    Retune | None,
    _reader(fields.read_retune),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "observe"]}, {"type": "boolean"}]}),
]
Slots = Annotated[int | None, _reader(fields.count_reader(1, 16)), _counts(1, 16)]
InFlight = Annotated[int | None, _reader(fields.count_reader(1, 16)), _counts(1, 16)]
Writers = Annotated[int | None, _reader(fields.count_reader(1, 512)), _counts(1, 512)]
Kept = Annotated[int | None, _reader(fields.count_reader(1, 10**6)), _counts(1, 10**6)]
Copies = Annotated[int | None, _reader(fields.count_reader(2, 16)), _counts(2, 16)]
SetSize = Annotated[int | None, _reader(fields.count_reader(2, 256)), _counts(2, 256)]
Parity = Annotated[int | None, _reader(fields.count_reader(1, 16)), _counts(1, 16)]
Floor = Annotated[int | None, _reader(fields.count_reader(0, 15)), _counts(0, 15)]
Rate = Annotated[float | None, _reader(fields.read_rate_bytes_per_s), _patterns(_RATE)]
StoragePrice = Annotated[
    Money | None, _reader(fields.read_storage_price), _patterns(_STORAGE_PRICE)
]
HourlyPrice = Annotated[Money | None, _reader(fields.read_hourly_price), _patterns(_HOURLY_PRICE)]
SchemeWord = Annotated[
    Scheme | None,
    _reader(fields.word_reader("none", "replicas", "xor", "rs")),
    _words("none", "replicas", "xor", "rs"),
]
ArrangementWord = Annotated[
    Arrangement | None,
    _reader(fields.word_reader("group", "mixed", "ring")),
    _words("group", "mixed", "ring"),
]
PeerPathWord = Annotated[
    PeerPath | None,
    _reader(fields.word_reader("host", "device")),
    _words("host", "device"),
]
PeerScheduleWord = Annotated[
    PeerSchedule | None,
    _reader(fields.word_reader("paced", "windows")),
    _words("paced", "windows"),
]
Schedule = Annotated[
    Literal["lazy", "blocking", "windows"] | None,
    _reader(fields.word_reader("lazy", "blocking", "windows")),
    _words("lazy", "blocking", "windows"),
]
Persist = Annotated[
    Literal["async", "sync"] | None,
    _reader(fields.word_reader("async", "sync")),
    _words("async", "sync"),
]
Clone = Annotated[
    Literal["on", "off"] | None,
    _reader(fields.word_reader("on", "off")),
    _words("on", "off"),
]
Standby = Annotated[
    Literal["on", "off"] | None,
    _reader(fields.word_reader("on", "off")),
    _words("on", "off"),
]
Stuck = Annotated[
    Literal["warn", "restart"] | None,
    _reader(fields.word_reader("warn", "restart")),
    _words("warn", "restart"),
]
Way = Annotated[
    Literal["host", "direct"] | None,
    _reader(fields.word_reader("host", "direct")),
    _words("host", "direct"),
]
Codec = Annotated[
    Literal["none", "planes", "delta", "zstd"] | None,
    _reader(fields.word_reader("none", "planes", "delta", "zstd")),
    _words("none", "planes", "delta", "zstd"),
]
ArchiveCodec = Annotated[
    Literal["none", "excp", "excp-published", "quantised"] | None,
    _reader(fields.word_reader("none", "excp", "excp-published", "quantised")),
    _words("none", "excp", "excp-published", "quantised"),
]
FullEvery = Annotated[int | None, _reader(fields.count_reader(1, 64)), _counts(1, 64)]
Objective = Annotated[
    Literal["goodput", "stall", "durability"] | None,
    _reader(fields.word_reader("goodput", "stall", "durability")),
    _words("goodput", "stall", "durability"),
]
Rule = Annotated[
    Literal["waste", "checkfreq"] | None,
    _reader(fields.word_reader("waste", "checkfreq")),
    _words("waste", "checkfreq"),
]


def _condition(value: Any) -> str:
    text = str(value)
    if isinstance(value, bool) or re.fullmatch(_CONDITION, text) is None:
        raise ValueError(f'expected a comparison, e.g. ">=512", got {value!r}')
    return text


Condition = Annotated[
    str,
    PlainValidator(_condition),
    WithJsonSchema({"type": ["string", "integer"], "pattern": f"^{_CONDITION}$"}),
]


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping of keys to values, got {value!r}")
    return value


class Section(BaseModel):
    """A mapping with known keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Memory(Section):
    """Checkpoints in this node's memory."""

    interval: Interval = None
    enabled: Switch = None
    slots: Slots = None


class Disk(Section):
    """Durable checkpoints."""

    interval: Interval = None
    path: Directory = None
    writers: Writers = None
    chunk: Chunk = None
    direct: Switch = None
    codec: Codec = None


class Staging(Section):
    """How bytes move."""

    schedule: Schedule = None
    persist: Persist = None
    streaming: Switch = None
    preallocate: Switch = None
    in_flight: InFlight = None
    device_clone: Clone = None
    path: Way = None


class RedundancySection(Section):
    """Copies and parity in the memory of other nodes."""

    scheme: SchemeWord = None
    copies: Copies = None
    placement: ArrangementWord = None
    set_size: SetSize = None
    parity: Parity = None
    path: PeerPathWord = None
    rate: Rate = None
    schedule: PeerScheduleWord = None
    floor: Floor = None


class LimitsSection(Section):
    """What auto may not exceed."""

    stall: Duration = None
    host_memory: Size = None
    overhead: Budget = None
    lost_time: Duration = None
    disk: Size = None


class PricesSection(Section):
    """What storage and time cost."""

    disk: StoragePrice = None
    node: HourlyPrice = None


class Failures(Section):
    """Failures as the user knows them."""

    mtbf: Duration = None
    process_share: Share = None
    preemption: Duration = None
    notice: Duration = None
    silent_latency: Duration = None
    stuck: Stuck = None


class Restart(Section):
    """How ranks are started again."""

    standby: Standby = None


class Keep(Section):
    """Retention."""

    last: Kept = None
    every: Interval = None


class Archive(Section):
    """A second, small copy of every good checkpoint."""

    codec: ArchiveCodec = None
    lossy: Switch = None
    full_every: FullEvery = None


class Remote(Section):
    """Copies of good checkpoints in an object store."""

    url: StoreUrl = None
    keep: Kept = None
    rate: Rate = None


class When(Section):
    """All of these must hold for an override to apply."""

    world_size: Condition | None = None
    nodes: Condition | None = None

    def holds(self, facts: dict[str, int]) -> bool:
        """Whether `facts` satisfy every condition; an unknown fact satisfies none."""
        conditions = {"world_size": self.world_size, "nodes": self.nodes}
        return all(
            name in facts and _compare(facts[name], text)
            for name, text in conditions.items()
            if text is not None
        )


class Settings(Section):
    """Everything a policy may set, also inside `overrides`."""

    interval: Interval = None
    memory: Annotated[Memory, BeforeValidator(_mapping)] = Memory()
    disk: Annotated[Disk, BeforeValidator(_mapping)] = Disk()
    staging: Annotated[Staging, BeforeValidator(_mapping)] = Staging()
    redundancy: Annotated[RedundancySection, BeforeValidator(_mapping)] = RedundancySection()
    objective: Objective = None
    limits: Annotated[LimitsSection, BeforeValidator(_mapping)] = LimitsSection()
    prices: Annotated[PricesSection, BeforeValidator(_mapping)] = PricesSection()
    failures: Annotated[Failures, BeforeValidator(_mapping)] = Failures()
    restart: Annotated[Restart, BeforeValidator(_mapping)] = Restart()
    keep: Annotated[Keep, BeforeValidator(_mapping)] = Keep()
    archive: Annotated[Archive, BeforeValidator(_mapping)] = Archive()
    remote: Annotated[Remote, BeforeValidator(_mapping)] = Remote()
    retune: Retuning = None
    rule: Rule = None


class Override(Section):
    """Settings for some sizes of the job; the first that matches is applied."""

    when: Annotated[When, BeforeValidator(_mapping)]
    set: Annotated[Settings, BeforeValidator(_mapping)]


def _version(value: Any) -> int:
    if value == VERSION and isinstance(value, int) and not isinstance(value, bool):
        return VERSION
    if isinstance(value, int) and not isinstance(value, bool) and value > VERSION:
        raise ValueError(f"version {value} needs a newer autockpt; this one reads {VERSION}")
    raise ValueError(f"expected {VERSION}, got {value!r}")


class PolicyFile(Settings):
    """A policy file."""

    version: Annotated[int, PlainValidator(_version), WithJsonSchema({"const": VERSION})]
    extends: Annotated[
        str | None, PlainValidator(fields.read_source), WithJsonSchema({"type": "string"})
    ] = None
    overrides: tuple[Override, ...] = ()


def goal_of(settings: Settings, name: str) -> Goal:
    """The Goal that validated settings stand for; `name` is where they came from."""
    memory, disk, staging = settings.memory, settings.disk, settings.staging
    limits, failures, keep = settings.limits, settings.failures, settings.keep
    memory_every = memory.interval or Every()
    disk_every = disk.interval or Every()
    kept = keep.every or Every()
    return Goal(
        objective=settings.objective or "goodput",
        limits=Limits(
            stall_s=limits.stall,
            host_memory_bytes=limits.host_memory,
            overhead=limits.overhead,
            lost_time_s=limits.lost_time,
            disk_bytes=limits.disk,
        ),
        prices=_prices(settings.prices),
        pins=Pins(
            memory_interval_steps=memory_every.steps,
            memory_interval_s=memory_every.seconds,
            disk_interval_steps=disk_every.steps,
            disk_interval_s=disk_every.seconds,
            memory_enabled=memory.enabled,
            schedule=staging.schedule,
            persist=staging.persist,
            streaming=staging.streaming,
            preallocate=staging.preallocate,
            in_flight=staging.in_flight,
            device_clone=staging.device_clone,
            path=staging.path,
            codec=disk.codec,
            chunk_bytes=disk.chunk,
            writers=disk.writers,
            slots=memory.slots,
            direct_io=disk.direct,
            retune=settings.retune,
            interval_rule=settings.rule,
            keep_last=keep.last,
        ),
        redundancy=_wish(settings.redundancy),
        failures=FailureDeclaration(
            mtbf_s=failures.mtbf,
            process_share=failures.process_share,
            preemption_s=failures.preemption,
            notice_s=failures.notice,
        ),
        restart=RestartWish(standby=settings.restart.standby, stuck=failures.stuck),
        retention=Retention(
            keep_last=keep.last or Retention().keep_last,
            keep_every_s=kept.seconds,
            keep_every_steps=kept.steps,
            reach_s=failures.silent_latency,
        ),
        archive=Archiving(
            codec=settings.archive.codec,
            lossy=bool(settings.archive.lossy),
            full_every=settings.archive.full_every or Archiving().full_every,
        ),
        remote=RemoteWish(
            url=settings.remote.url,
            keep_last=settings.remote.keep or RemoteWish().keep_last,
            rate_bytes_per_s=settings.remote.rate,
        ),
        storage_path=disk.path,
        policy=name,
    )


def settings_of(goal: Goal) -> Settings:
    """The settings that make a Goal: `goal_of` the other way round."""
    pins, limits, wish, prices = goal.pins, goal.limits, goal.redundancy, goal.prices
    failures, retention, archive, remote = goal.failures, goal.retention, goal.archive, goal.remote
    keep_last = retention.keep_last if retention.keep_last != Retention().keep_last else None
    return Settings.model_construct(
        objective=goal.objective,
        memory=Memory.model_construct(
            interval=_every(pins.memory_interval_steps, pins.memory_interval_s),
            enabled=pins.memory_enabled,
            slots=pins.slots,
        ),
        disk=Disk.model_construct(
            interval=_every(pins.disk_interval_steps, pins.disk_interval_s),
            path=goal.storage_path,
            writers=pins.writers,
            chunk=pins.chunk_bytes,
            direct=pins.direct_io,
            codec=pins.codec,
        ),
        staging=Staging.model_construct(
            schedule=pins.schedule,
            persist=pins.persist,
            streaming=pins.streaming,
            preallocate=pins.preallocate,
            in_flight=pins.in_flight,
            device_clone=pins.device_clone,
            path=pins.path,
        ),
        redundancy=RedundancySection.model_construct(
            scheme=wish.scheme,
            copies=wish.copies,
            placement=wish.placement,
            set_size=wish.set_size,
            parity=wish.parity,
            path=wish.path,
            rate=wish.rate_bytes_per_s,
            schedule=wish.schedule,
            floor=wish.floor,
        ),
        limits=LimitsSection.model_construct(
            stall=limits.stall_s,
            host_memory=limits.host_memory_bytes,
            overhead=limits.overhead,
            lost_time=limits.lost_time_s,
            disk=limits.disk_bytes,
        ),
        prices=PricesSection.model_construct(
            disk=_money(prices.disk_per_gb_month, prices.currency),
            node=_money(prices.node_per_h, prices.currency),
        ),
        failures=Failures.model_construct(
            mtbf=failures.mtbf_s,
            process_share=failures.process_share,
            preemption=failures.preemption_s,
            notice=failures.notice_s,
            silent_latency=retention.reach_s,
            stuck=goal.restart.stuck,
        ),
        restart=Restart.model_construct(standby=goal.restart.standby),
        keep=Keep.model_construct(
            last=pins.keep_last or keep_last,
            every=_every(retention.keep_every_steps, retention.keep_every_s),
        ),
        archive=Archive.model_construct(
            codec=archive.codec, lossy=archive.lossy, full_every=archive.full_every
        ),
        remote=Remote.model_construct(
            url=remote.url, keep=remote.keep_last, rate=remote.rate_bytes_per_s
        ),
        retune=pins.retune,
        rule=pins.interval_rule,
    )


def _every(steps: int | None, seconds: float | None) -> Every | None:
    return None if steps is None and seconds is None else Every(steps=steps, seconds=seconds)


def _money(amount: float | None, currency: str) -> Money | None:
    return None if amount is None else Money(amount=amount, currency=currency)


def _prices(section: PricesSection) -> Prices:
    disk, node = section.disk, section.node
    return Prices(
        disk_per_gb_month=disk.amount if disk is not None else None,
        node_per_h=node.amount if node is not None else None,
        currency=next((price.currency for price in (disk, node) if price is not None), ""),
    )


def _wish(section: RedundancySection) -> RedundancyWish:
    return RedundancyWish(
        scheme=section.scheme,
        copies=section.copies,
        placement=section.placement,
        set_size=section.set_size,
        parity=section.parity,
        path=section.path,
        rate_bytes_per_s=section.rate,
        schedule=section.schedule,
        floor=section.floor or 0,
    )


def keys() -> tuple[str, ...]:
    """Every settable key, dotted, in the order of the models."""
    found: list[str] = []
    for name, info in Settings.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found += [f"{name}.{key}" for key in inner.model_fields]
        else:
            found.append(name)
    return tuple(found)


def _compare(fact: int, condition: str) -> bool:
    match = re.fullmatch(_CONDITION, condition)
    assert match is not None, "validated by _condition"
    sign, bound = match.group(1) or "==", int(match.group(2))
    return {
        ">=": fact >= bound,
        "<=": fact <= bound,
        ">": fact > bound,
        "<": fact < bound,
        "==": fact == bound,
    }[sign]
