"""Text and tokens: tokenisers and the formats of conversations."""
