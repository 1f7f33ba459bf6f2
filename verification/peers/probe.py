"""Checks in a separate process that a peer can be run, since an import may hang or abort."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from verification.failures import Refused, name_exit
from verification.peers.known_peers import ready
from verification.run.processes.parent_death import end_with_parent

TIMEOUT = 120.0  # seconds: the first import may compile


def probe(name: str, timeout: float = TIMEOUT, ready: Callable[[str], object] = ready) -> None:
    """Import the peer in a process of its own. Raises Refused if it cannot be run. ready: finds the peer of that name,
    does its imports, and raises Refused for what it finds wrong.

    The process is forked, since this one has imported torch already: a wrong name is told at once. Where torch sees a
    GPU the process starts anew, since CUDA does not survive a fork.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    spawn, fork = multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")
    start: type[BaseProcess] = spawn.Process if torch.cuda.is_available() else fork.Process
    process = start(target=_answer, args=(sender, name, ready), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise Refused(f"importing {name} failed: no answer within {timeout:g} s")
        reason: str | None = receiver.recv()
    except EOFError:
        process.join()
        raise Refused(f"importing {name} failed: its process {name_exit(process.exitcode)}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if reason is not None:
        raise Refused(reason)


def _answer(sender: Connection, name: str, ready: Callable[[str], object]) -> None:
    """Send the reason why the peer cannot be run; None if it can."""
    end_with_parent()  # an import may never end
    torch.set_num_threads(1)  # threads of the parent's pool do not exist here: a parallel product would wait for them
    try:
        ready(name)
    except Refused as error:
        sender.send(str(error))
    except BaseException as error:  # a user's module may raise anything
        sender.send(f"importing {name} raised {type(error).__name__}: {error}")
    else:
        sender.send(None)
