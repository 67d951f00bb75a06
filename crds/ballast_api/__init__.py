"""The contracts that users write: `InferenceDeployment`, `WorkerConfig`, and the sections they share.

Law: one pydantic model per thing a user can say; every field has an effect or is refused with a sentence.
Imports pydantic and the standard library only.
"""
