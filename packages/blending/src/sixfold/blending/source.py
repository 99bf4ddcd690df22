"""Documents of a user, by the path that pages name: ``DocumentSource``, and lists in memory for trials (this file)."""

from sixfold.blending.documents.source import DocumentSource, ListSource

__all__ = ["DocumentSource", "ListSource"]
