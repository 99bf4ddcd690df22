"""Public path of sources of documents: ``DocumentSource``, and lists in memory for trials (this file)."""

from sixfold.blending.documents.source import DocumentSource, ListSource

__all__ = ["DocumentSource", "ListSource"]
