"""Write a pair from a few texts, read it back, join it with itself and check it. Runs in a temporary folder."""

import os
import tempfile

from sixfold.indexed_data import IndexedDataset, build, merge, verify

os.chdir(tempfile.mkdtemp())
with open("verses.txt", "w") as file:
    file.write("Shall I compare thee\nto a summer's day?\n\nThou art more lovely\nand more temperate.\n")

report = build(["verses.txt"], "verses", text_documents="paragraph")
print(f"{report.documents} documents, {report.tokens} tokens of {report.dtype}, end of document included")

dataset = IndexedDataset("verses")
print("document 1, from byte 9:", bytes(dataset.get(1, offset=9, length=11).tolist()).decode())

merge(["verses", "verses"], "twice")
print("twice:", verify("twice", vocab_size=257))
