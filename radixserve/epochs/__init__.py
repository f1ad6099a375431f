"""Weight epochs: other weights while the engine runs. See docs/rl.md."""
