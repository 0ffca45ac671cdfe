"""The transformer agent: V-trace over tokens, sharded over a mesh."""
