"""The clients that speak to a replay server, by name; nothing is imported."""

WIRE = 'wire'
OFFICIAL = 'official'
CLIENTS = (WIRE, OFFICIAL)

DEFAULT = WIRE
