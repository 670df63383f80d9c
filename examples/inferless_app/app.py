"""An Inferless app, as it would be imported there: what it takes stands in input_schema.py."""

import json


class InferlessPythonModel:
    def initialize(self):
        self.labels = ["house", "forest", "river"]

    def infer(self, inputs):
        prompt = inputs["prompt"]
        words = prompt.lower().split()
        scores = {label: words.count(label) / len(words) for label in self.labels}
        return {
            **scores,
            "found": [label for label in self.labels if scores[label]],
            "shape": inputs.get("shape", [256, 1]),
            "result": json.dumps({"best": max(scores, key=scores.get)}),
        }

    def finalize(self):
        self.labels = None
