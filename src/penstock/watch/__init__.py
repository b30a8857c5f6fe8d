"""Measure a run, and explain its waits: stage times, verdicts, heartbeat, report, health.

Records on the threads that do the work, judges elsewhere, and never delays a step.
"""
