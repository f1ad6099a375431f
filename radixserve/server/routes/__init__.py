"""The routes, a file or folder a protocol."""
