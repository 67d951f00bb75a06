"""The contracts that users write: `WorkerConfig` and the sections that a resource shares with it.

Law: one pydantic model per thing a user can say; every field has an effect or is refused with a sentence.
Imports pydantic and the standard library only.
"""
