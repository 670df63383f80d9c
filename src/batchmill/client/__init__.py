"""The SDK. What to send and what came back is decided once, without input or output, in `calls`, `procedures` and
`streams`; `sync` and `asynchronous` are the two shells that carry it over httpx."""
