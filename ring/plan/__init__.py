"""What a rank computes and what it sends, as integers: no tensors of data, no communication."""
