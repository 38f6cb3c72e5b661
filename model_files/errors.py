"""What can go wrong with a model's files.

ModelFilesError      one line for the user: what is wrong with which file, and what to do
"""


class ModelFilesError(Exception):
    """A model that cannot be found, read or served; the text is one line that says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
