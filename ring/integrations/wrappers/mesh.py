"""The meshes of a training step, of any number of dimensions with any names.

    mesh = init_device_mesh("cuda", (2, 4, 8, 2), mesh_dim_names=("replicate", "shard", "context", "tensor"))
    ours = mesh["replicate", "shard", "context"]              # the ranks that have tokens of their own
    context = ContextParallel(layout, mesh["context"])
    fsdp.shard(model, ours, layers, replicate="replicate", same_tokens="tensor")
    loss = cross_entropy(logits, labels, ours)

The README of integrations has a table of which mesh goes where. A wrapper refuses a slice that leaves out other
dimensions of its root mesh, since models would drift apart, and losses over other ranks than its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch.distributed.device_mesh import DeviceMesh

from ring.integrations.wrappers.former_name import takes_former_name


@takes_former_name
def averaging_mesh(mesh: DeviceMesh, same_tokens: str | Iterable[str] = ()) -> DeviceMesh:
    """Return the mesh, flattened to one dimension with ranks in ascending order.

    Args:
        mesh: of the ranks with tokens of their own, with named dimensions.
        same_tokens: names of the dimensions of its root mesh along which ranks hold the same tokens.

    Raises:
        ValueError: a mesh without names, or one that leaves out dimensions of its root mesh besides `same_tokens`.
    """
    _check(mesh, _names("same_tokens", same_tokens))
    return _ascending(_flat(mesh))


@takes_former_name
def replicating_mesh(
    mesh: DeviceMesh, replicate: str | Iterable[str], same_tokens: str | Iterable[str] = ()
) -> DeviceMesh:
    """Return a mesh of two dimensions: FSDP replicates along the first, and shards along the second.

    Args:
        mesh: of the ranks with tokens of their own, with named dimensions.
        replicate: names of its dimensions along which the model is replicated. It is sharded along all others, in which
            ranks must be ascending (see `averaging_mesh`).
        same_tokens: names of the dimensions of its root mesh along which ranks hold the same tokens.

    Raises:
        ValueError: any other mesh, or other names.
    """
    _check(mesh, _names("same_tokens", same_tokens))
    assert mesh.mesh_dim_names is not None
    replicated = _names("replicate", replicate)
    sharded = tuple(name for name in mesh.mesh_dim_names if name not in replicated)
    if not replicated or not sharded or len(replicated) + len(sharded) != mesh.ndim:
        raise ValueError(
            f"replicate must name dimensions of mesh {mesh.mesh_dim_names}, but not all of them, got {replicate!r}"
        )
    in_order = tuple(name for name in mesh.mesh_dim_names if name in replicated)
    both = DeviceMesh._concatenate([_flat(mesh[in_order]), _flat(mesh[sharded])])  # private, as `_flatten`
    if any(line != sorted(line) for line in both.mesh.tolist()):
        raise ValueError(f"mesh must have ascending ranks along {sharded}, got {both.mesh.tolist()}")
    return both


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh._flatten()  # private in torch, but in common use


def _ascending(flat: DeviceMesh) -> DeviceMesh:
    """Sort the ranks as torch sorts those of a group: FSDP places shards by the group, distributed checkpoints by the
    mesh. If their orders differ, torch saves parameters with parts swapped.
    """
    if flat.mesh.tolist() == sorted(flat.mesh.tolist()):
        return flat
    return DeviceMesh.from_group(flat.get_group(), flat.device_type, mesh_dim_names=flat.mesh_dim_names)


def _names(argument: str, names: str | Iterable[str]) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{argument} must be names of mesh dimensions, such as 'data', got {names!r}")
    return listed


def _check(mesh: DeviceMesh, same_tokens: tuple[str, ...]) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got a {type(mesh).__name__}")
    if not mesh.mesh_dim_names:
        raise ValueError("mesh must have named dimensions (mesh_dim_names), got none")
    root = mesh._get_root_mesh()
    others = [name for name in root.mesh_dim_names or () if name not in mesh.mesh_dim_names]
    if unknown := [name for name in same_tokens if name not in others]:
        raise ValueError(
            f"same_tokens must name dimensions of the root mesh that mesh leaves out, {others}, got {unknown}"
        )
    if mesh.size() * prod(root[name].size() for name in same_tokens) != root.size():
        raise ValueError(
            f"mesh must have all ranks with tokens of their own, got {mesh.size()} of the {root.size()} ranks of its "
            f"root mesh {root.mesh_dim_names}: slice {mesh.mesh_dim_names} and the other dimensions together, or name "
            f"in same_tokens those along which ranks hold the same tokens, as in tensor parallelism"
        )
