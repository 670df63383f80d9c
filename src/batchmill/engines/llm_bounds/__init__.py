"""What a request may ask of an engine server: bounds for its schemas, patterns, grammars and numbers."""
