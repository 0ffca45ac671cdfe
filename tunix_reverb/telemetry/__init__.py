"""What a run says about itself: metrics, timing, compiles, liveness."""
