"""A function behind BentoML: `bentoml serve serve_bentoml:Double --port PORT`, in BentoML's own environment."""

from __future__ import annotations

import bentoml


@bentoml.service(workers=1)
class Double:
    @bentoml.api(route="/double")
    def double(self, data: int) -> dict:
        return {"data": 2 * data}
