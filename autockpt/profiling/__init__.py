"""`autockpt profile` inside the training process: wires movers of executors/ into the probes.

        install     before the user's script starts: hooks that find, time and finally end it
        adopt       called by `autockpt.attach` while a profile is taken
        finish      after a script that ended before the profile was complete
        facts       a profile's facts about job and machine without timing; also for runs

The script never notices until `StopTraining` rises out of one of its optimizer steps.
"""
