"""Clients that speak the replay server's gRPC protocol, without dm-reverb."""
