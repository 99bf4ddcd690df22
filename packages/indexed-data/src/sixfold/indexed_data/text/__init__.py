"""From text files to a pair.

files --> inputs.py --> document_ids.py (tokenizers.py) --> parts.py --> build.py --> PREFIX.bin, PREFIX.idx

From outside: build, inputs, tokenizers.
"""
