"""A cache's events in vLLM's format over ZeroMQ, for others' routers. msgspec, pyzmq."""
