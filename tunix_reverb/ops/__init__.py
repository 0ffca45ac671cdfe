"""Pure functions of arrays: V-trace, distributions, losses."""
