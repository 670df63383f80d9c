"""From an order to rows that may run: checked, estimated, planned, routed."""
