"""Partial attention of a tile and the merge of partial results: no communication."""
