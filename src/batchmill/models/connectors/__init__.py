"""What connectors are and how their calls are made: pure, with no connection and no secret of its own."""
