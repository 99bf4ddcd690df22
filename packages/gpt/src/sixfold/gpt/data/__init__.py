"""From texts to token pairs, and from positions of an order to microbatches on the device.

blend_changes reads data.changes. From outside: cpython_corpus, exact_losses, host_to_device, loss_by_dataset,
prefetch, prepare, token_stream, tokenizer, own_data.
"""
