"""The routes: one file or folder per protocol."""
