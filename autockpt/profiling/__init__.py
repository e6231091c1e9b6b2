"""`autockpt profile` inside the training process: wires movers of executors/ into the probes.

    install     before the user's script starts: hooks that find, time and finally end it
    adopt       what `autockpt.attach` does while a profile is taken
    finish      after a script that ended before the profile was complete
    facts       what a profile says about job and machine without timing anything; also for runs

The script never notices until `StopTraining` rises out of one of its optimizer steps.
"""

from autockpt.profiles.assemble import JobFacts, profile_from_run
from autockpt.profiles.freshness import mismatches, require_fresh
from autockpt.profiles.samples import RunSamples
from autockpt.profiles.schedule import ProfileSettings
from autockpt.profiling.conductor import StopTraining
from autockpt.profiling.entry import adopt, finish, install
from autockpt.profiling.facts.facts import fingerprint, host_facts, state_inventory
from autockpt.profiling.pass_through import PassThroughSession

__all__ = [
    "JobFacts",
    "PassThroughSession",
    "ProfileSettings",
    "RunSamples",
    "StopTraining",
    "adopt",
    "fingerprint",
    "finish",
    "host_facts",
    "install",
    "mismatches",
    "profile_from_run",
    "require_fresh",
    "state_inventory",
]
