"""The contracts that users write: `InferenceDeployment`, `WorkerConfig`, and the sections that they share.

Law: each contract is one pydantic model. Every field has an effect, or is refused with a sentence.
Imports only pydantic and the standard library.
"""
