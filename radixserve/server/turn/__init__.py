"""The life of one HTTP generation, common to all protocols.

`ChatTurn` renders and tokenises a chat. `HttpGeneration` checks the queue, submits to the engine
and aborts on disconnect. An `AnswerBuilder` formats the answer or its stream, which an
`EventStream` sends.
"""
