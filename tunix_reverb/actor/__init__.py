"""The actor role: a batched policy that steps environments without pause."""
