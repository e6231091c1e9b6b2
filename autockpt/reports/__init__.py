"""HOW DID IT GO?

Values in, text out: HTML, terminal, JSON, CSV, Prometheus, all from one model.  Nothing here opens
a file, reads a clock or decides anything.

    RunData  --build-->  ReportModel  --render-->  text
"""
