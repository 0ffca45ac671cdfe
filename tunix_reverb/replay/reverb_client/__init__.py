"""Server and clients on the official dm-reverb; the only importer of it."""
