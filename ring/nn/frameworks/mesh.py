"""The mesh of a training step: data x context.

Ranks along "context" hold parts of the same sequences, ranks along "data" hold different sequences. Each rank has its
own tokens, so gradients are averaged over all ranks of both dimensions.

    mesh = init_device_mesh("cuda", (data, context), mesh_dim_names=("data", "context"))
    context = ContextParallel(layout, mesh["context"])
    model = ddp.wrap(model, mesh)          # not mesh["data"], which lacks the other parts of the sequences
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

DATA, CONTEXT = "data", "context"


def averaging_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh, flattened to one dimension with ranks in ascending order.

    Args:
        mesh: of ("data", "context"), or of "context" alone.

    Raises:
        ValueError: a mesh without names, without the dimension "context", or with other dimensions, over which
            averaging may be wrong: pass the part that is data x context, as mesh["data", "context"].
    """
    _check(mesh)
    flat = mesh if mesh.ndim == 1 else mesh._flatten()  # private in torch, but in common use
    if flat.mesh.tolist() == sorted(flat.mesh.tolist()):
        return flat
    # Sort the ranks as torch sorts those of a group: FSDP places shards by the group, distributed checkpoints by the
    # mesh. If their orders differ, torch saves parameters with parts swapped.
    return DeviceMesh.from_group(flat.get_group(), flat.device_type, mesh_dim_names=flat.mesh_dim_names)


def replicating_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh, over which FSDP replicates and shards, after validation.

    Args:
        mesh: of ("data", "context"), with context ranks in ascending order (see `averaging_mesh`).

    Raises:
        ValueError: any other mesh.
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
            "gradients are averaged over every rank that holds a part of the sequences"
        )
