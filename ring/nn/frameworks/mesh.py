"""The mesh of a training step: data x context.

Ranks along "context" hold parts of the same sequences, ranks along "data" hold other sequences. Each of them has its
own tokens, so the gradients of all of them are averaged, whichever dimension they are along.

    mesh = init_device_mesh("cuda", (data, context), mesh_dim_names=("data", "context"))
    context = ContextParallel(layout, mesh["context"])
    model = ddp.wrap(model, mesh)          # not mesh["data"]: that would leave out the other parts of the sequences
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

DATA, CONTEXT = "data", "context"


def averaging_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of a mesh of ("data", "context"), or of ("context",), as a mesh of one dimension, in ascending order.

    Raises ValueError for a mesh without names, without the dimension "context", or with other dimensions: over which of
    those gradients are to be averaged is not known here, so give the part that is data x context, as
    mesh["data", "context"].
    """
    _check(mesh)
    flat = mesh if mesh.ndim == 1 else mesh._flatten()  # torch's own name for it, which others use too
    if flat.mesh.tolist() == sorted(flat.mesh.tolist()):
        return flat
    # The ranks of a group are in ascending order, whatever their order in the mesh. FSDP places its shards by the
    # group, distributed checkpoints go by the mesh: where these differ, torch saves parameters with parts swapped.
    return DeviceMesh.from_group(flat.get_group(), flat.device_type, mesh_dim_names=flat.mesh_dim_names)


def replicating_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh of ("data", "context"), in the order in which FSDP replicates and shards.

    Raises ValueError for any other mesh, and where a line of context ranks does not ascend (see `averaging_mesh`).
    """
    _check(mesh)
    if mesh.mesh_dim_names != (DATA, CONTEXT):
        raise ValueError(
            f"mesh must have the dimensions ({DATA!r}, {CONTEXT!r}), in this order, to replicate over {DATA!r}, "
            f"got {mesh.mesh_dim_names}"
        )
    if any(line != sorted(line) for line in mesh.mesh.tolist()):
        raise ValueError(f"mesh must have ascending ranks along {CONTEXT!r}, got {mesh.mesh.tolist()}")
    return mesh


def _check(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got a {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if names not in ((DATA, CONTEXT), (CONTEXT, DATA), (CONTEXT,)):
        raise ValueError(
            f"mesh must have the dimensions ({DATA!r}, {CONTEXT!r}), or {CONTEXT!r} alone, got {names or 'no names'}: "
            "every rank that holds a part of the sequences takes part in the average of gradients"
        )
