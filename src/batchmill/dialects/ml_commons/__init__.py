"""The API of OpenSearch ML Commons: connectors, remote models, batch predict and tasks. Source: ML Commons 3.x."""
