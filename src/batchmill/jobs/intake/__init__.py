"""Turns an order into rows that may run: checked, estimated, planned, routed."""
