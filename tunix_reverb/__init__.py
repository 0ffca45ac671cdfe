"""tunix_reverb: decoupled reinforcement learning on JAX and Reverb.

Actors stream trajectories into a Reverb server; a continuous learner packs
them into rows of fixed length, corrects for policy lag with V-trace, and
publishes its variables back. The modules are read top to bottom in the order
`types`, `core`, `environments`, `actor`, `replay`, `batching`, `learner`,
`agents`; importing this package imports none of them.
"""

__version__ = '0.1.0'
