"""Short programs that compose the parts with code of your own."""
