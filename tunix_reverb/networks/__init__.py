"""Policy networks: torsos, recurrent cores, heads."""
