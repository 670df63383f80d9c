"""The Open Inference Protocol (V2) with Triton's extensions. Source: its specification, Triton's docs."""
