"""Training steps with the same bits on any number of ranks: see SAME_WEIGHTS.md in the folder above.

chunk_rows      chunks of a rank, and the pieces of its tensors
chunked_calls   calls of modules, chunk by chunk
comparison      chunks alone with those of a rank
gradient_sums   sums of the gradients of chunks, over ranks
share_messages  messages with shares of gradients, which begin in the backward
wrapper         the model, in place of DDP
"""
