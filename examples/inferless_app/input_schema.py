INPUT_SCHEMA = {
    "prompt": {
        "datatype": "STRING",
        "required": True,
        "shape": [1],
        "example": ["There is a fine house in the forest"],
    },
    "shape": {"datatype": "INT8", "required": False, "example": [512, 1], "shape": [2]},
}
