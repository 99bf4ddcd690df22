"""Models of Hugging Face, in and out; the code is in huggingface/convert.py."""

from sixfold.gpt.huggingface.convert import export_model, import_model

__all__ = ["export_model", "import_model"]
