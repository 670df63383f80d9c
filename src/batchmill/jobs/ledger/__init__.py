"""The record of which rows are done: plans, commits, recovery and audit."""
