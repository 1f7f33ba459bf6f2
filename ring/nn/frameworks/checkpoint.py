"""Place of a module of former versions, which says where it went."""

raise ModuleNotFoundError(
    "ring.nn.frameworks.checkpoint is now scripts/checkpoint.py, beside scripts/train.py: copy it and write "
    "`import checkpoint`, or use torch.distributed.checkpoint",
    name=__name__,
)
