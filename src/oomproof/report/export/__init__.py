"""The profile in the formats of other viewers, one file each; ``memory_viz`` copies what PyTorch wrote."""
