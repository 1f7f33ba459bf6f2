"""Faults of a training: of its checkpoints in one process, and of its processes."""

from __future__ import annotations

from verification.faults import checkpoint_faults, training_process
from verification.faults.seeded_faults import SeededFault, SeededFaults

IN_FILES = {
    **{name: SeededFault(title, "named with its file", checkpoint_faults.damaged_by(name))
       for name, title in checkpoint_faults.DAMAGE.items()},
    "foreign": SeededFault("a checkpoint of others", "refused by a name", checkpoint_faults.foreign),
    "full": SeededFault("a full disk", "named, nothing left", checkpoint_faults.full_disk),
    "killed": SeededFault("a kill within a saving", "one checkpoint whole", checkpoint_faults.killed),
    "held": SeededFault("a folder that is held", "its holder named", checkpoint_faults.held),
    "taken": SeededFault("a saving over another", "refused, that stays whole", checkpoint_faults.taken),
}  # fmt: skip
IN_PROCESSES = {
    name: SeededFault(title, "nothing lost or left behind", training_process.striking(name))
    for name, title in training_process.STRIKES.items()
}
TRAINING_FAULTS = SeededFaults("training_fault", "training", IN_FILES, IN_PROCESSES, every=32)
