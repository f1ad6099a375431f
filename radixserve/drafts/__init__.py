"""Drafts: guesses of a request's next tokens, which the step that computes them verifies. They plug
into the scheduler as a `Drafter`, and into the engine as an `EngineExtension`."""
