"""`ballast fetch`: download the files of a model to a directory, in an init container or on a laptop.

location -> source (hub, bucket) -> model_files -> store. A source lists the files and reads a file from an offset. The
store resumes and verifies, and marks a directory as complete when it has all files.
"""
