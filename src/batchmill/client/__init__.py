"""The SDK. `AsyncClient` is written by hand and `Client` is generated from it. Both send the requests of `calls` over a
transport."""
