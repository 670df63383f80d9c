"""Turns an order into rows that may run: checked, estimated, planned, routed."""

PREPARE = "batchmill.jobs.intake.preparation:prepare"  # what seals and plans a job, in a child process
