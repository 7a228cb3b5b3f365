"""Processes that stay, for each world size, to which tests send the cases that all ranks run together.

torch's MultiProcessTestCase is private, wants unittest classes, and starts new processes, which import torch, for each
test.
"""

import datetime
import faulthandler
import importlib
import os
import pathlib
import signal
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.guards import leave_guards_untimed

TIMEOUT = 60  # seconds a collective waits for a rank that failed
CASE_TIMEOUT = 300
# What ranks on a CPU are forked with: to import it takes 4 to 8 s a process. Where it cannot be imported, ranks do it.
PRELOAD = [
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "xent_ops.distributed",
]


def _serve(rank, world, device, folder, pipe):
    faulthandler.register(signal.SIGUSR1, os.open(f"{folder}/stacks of rank {rank}", os.O_WRONLY | os.O_CREAT))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world > torch.cuda.device_count():
            # NCCL refuses two ranks on one GPU of a host. As hosts of their own they talk through sockets.
            os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    while (request := pipe.recv()) is not None:
        module, name, args = request
        try:
            torch.manual_seed(0)
            leave_guards_untimed()
            getattr(importlib.import_module(module), name)(device, *args)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
        torch.compiler.reset()
    dist.destroy_process_group()


class Workers:
    """``run(case, *args)`` calls ``case(device, *args)`` on every rank and raises what any of them raised."""

    def __init__(self, world, device):
        self.broken = False  # after a failure ranks may be in the middle of different collectives
        self.folder = tempfile.TemporaryDirectory()
        context = mp.get_context("forkserver" if device == "cpu" else "spawn")  # CUDA's state is not forked
        if device == "cpu":
            context.set_forkserver_preload(PRELOAD)
        self.pipes, self.processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            arguments = (rank, world, device, self.folder.name, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # then a rank that dies is an EOFError here, not a wait
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, case, *args):
        for pipe in self.pipes:
            pipe.send((case.__module__, case.__name__, args))
        deadline = time.monotonic() + CASE_TIMEOUT
        failures = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} did not answer in {CASE_TIMEOUT} s:\n{self._stacks(rank)}")
                continue
            try:
                failure = pipe.recv()
            except EOFError:
                failure = "the process died"
            if failure is not None:
                failures.append(f"rank {rank}: {failure}")
        self.broken = bool(failures)
        assert not failures, "\n".join(failures)

    def _stacks(self, rank):
        """Where the threads of a rank stand. It writes them without Python's lock, which a hanging rank may hold."""
        file = pathlib.Path(self.folder.name, f"stacks of rank {rank}")
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return file.read_text()

    def close(self):
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(0 if self.broken else 10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()
