"""Several processes that train one model, as `torchrun` starts them: what they add up and agree on.

Every rank holds the same weights, or its part of them (`shard`), and draws other batches. Losses are divided
by the counts of all ranks before the backward pass, and gradients are added up, so that N ranks give the
numbers of one rank on the same batches, however unequally targets are spread. What a run says and writes,
rank 0 says and writes; of the optimizer's state every rank writes its share.

`Ranks()` is the run of one process: nothing is sent, and nothing of `torch.distributed` is needed.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastbert.errors import UserError

PREPARATION = timedelta(days=30)  # that rank 0 may take over the corpus while the others wait
MEETING_S = 600.0  # in which the ranks of a start have to meet
SPEECH_S = 1.0  # torchrun kills all ranks at the first exit: the one that speaks gets the time to
GRACE_S = 5.0  # in which ranks that lost the others report, before the silent ones are named
RELEASE_S = 0.1  # in which gloo's threads let go of what they hold
# NCCL ends a process by itself: after gloo, which lets it say what happened
NCCL_FACTOR = 2


class OtherRankFailed(Exception):
    """Another rank ends the run, and has said why."""


class Ranks:
    """This process among those of a run.

    Attributes: `rank` of `world_size`, and `local_rank` of `local_world_size` on this machine.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        local_world_size: int = 1,
        store: dist.Store | None = None,  # where several ranks meet
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self._store: Any = store
        self._control: Any = None  # a gloo group for what hosts tell each other
        # another one for those threads that write checkpoints, whose messages come in between
        self.writers: Any = None
        self._timeout = timedelta(0)

    @classmethod
    def from_environment(cls) -> Ranks:
        """What `torchrun` says of this process in the environment; one process where it says nothing.

        Connects to the others' store. UserError where it cannot be reached.
        """
        environment = os.environ
        if int(environment.get("WORLD_SIZE", 1)) == 1 or "RANK" not in environment:
            return cls()
        try:
            store, rank, world_size = next(dist.rendezvous("env://"))
        except (RuntimeError, ValueError) as error:
            address = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
            raise UserError(
                f"the other ranks cannot be reached at {address} ({_first_line(error)}); start the run with "
                "torchrun, and check the address that it was given"
            ) from error
        store = _of_this_attempt(store, rank, world_size)
        ranks = cls(
            rank,
            world_size,
            int(environment.get("LOCAL_RANK", rank)),
            int(environment.get("LOCAL_WORLD_SIZE", world_size)),
            store,
        )
        store.set(f"fastbert/host/{rank}", socket.gethostname())
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def join(self, device: torch.device, timeout_s: float) -> None:
        """Make the process groups: NCCL for tensors on GPUs, gloo for those of hosts.

        A rank that keeps the others waiting for longer than `timeout_s` is an error on the others.
        """
        if self.alone:
            return
        self._timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if not dist.is_nccl_available():
                raise UserError("several ranks on GPUs need NCCL, which this torch lacks; use --device cpu")
        options: dict[str, Any] = {"backend": "gloo", "timeout": self._timeout}
        if device.type == "cuda":
            options = {"backend": "cpu:gloo,cuda:nccl", "timeout": self._timeout * NCCL_FACTOR}
        dist.init_process_group(store=self._store, rank=self.rank, world_size=self.world_size, **options)
        self._control = dist.group.WORLD
        if device.type == "cuda":
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        self.writers = dist.new_group(backend="gloo", timeout=self._timeout)

    def leave(self) -> None:
        """Give the process groups back, at the end of a run that went well."""
        if self._control is not None:
            # gloo's threads free the tensors of what they ran, and end the process with SIGABRT where Python
            # is gone by then: let all of it end, the last vote included, and let them have the interpreter
            dist.barrier(group=self._control)
            time.sleep(RELEASE_S)
            dist.destroy_process_group()
            self._control = None

    @cached_property
    def host_mesh(self) -> Any:
        """The ranks as a DeviceMesh of hosts."""
        return dist.device_mesh.DeviceMesh.from_group(self.writers, "cpu")

    # ---- what one rank does for all

    @contextmanager
    def main_first(self, what: str) -> Iterator[None]:
        """The block runs on rank 0, then on the others, which find what it left on the disk.

        OtherRankFailed on the others where it fails on rank 0. `what` must be a new name each time.
        """
        if self.alone:
            yield
            return
        key = f"fastbert/main/{what}"
        if not self.is_main:
            self._store.wait([key], PREPARATION)
            if self._store.get(key) != b"done":
                raise OtherRankFailed
            yield
            return
        try:
            yield
        except BaseException:
            self._store.set(key, "failed")
            raise
        self._store.set(key, "done")

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        values = [value]
        if not self.alone:
            dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, on rank 0; None on the others."""
        if self.alone:
            return [value]
        values = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values

    # ---- sums

    def sum_(self, tensor: Tensor) -> Tensor:
        """`tensor`, on the device that trains, becomes its sum over all ranks. The host does not wait."""
        if not self.alone:
            dist.all_reduce(tensor)
        return tensor

    def sum_on_host(self, values: Sequence[float | Tensor]) -> list[float]:
        """Each value's sum over all ranks, in fp64. Waits for the device."""
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if not self.alone:
            dist.all_reduce(sums, group=self._control)
        return sums.tolist()

    # ---- the end of a run

    def is_first_to_fail(self) -> bool:
        """Whether no rank has ended with an error before this one: it alone says so."""
        try:
            return self.alone or int(self._store.add("fastbert/failed", 1)) == 1
        except dist.DistError:  # the store went with the process that held it
            return True

    def explain(self, error: BaseException) -> str | None:
        """The sentence for an error of communication, which names the ranks that are silent.

        None for an error of another kind, "" where another rank has said why the run ends.
        """
        if self.alone or not is_of_communication(error):
            return None
        try:
            return self._name_the_silent(error)
        except dist.DistError:  # the store itself went with the process that held it
            return ""

    def _name_the_silent(self, error: BaseException) -> str:
        self._store.set(f"fastbert/waiting/{self.rank}", "")
        deadline = time.monotonic() + GRACE_S
        silent: list[int] = []
        while time.monotonic() < deadline:
            if int(self._store.add("fastbert/failed", 0)):
                return ""
            silent = [
                rank for rank in range(self.world_size) if not self._store.check([f"fastbert/waiting/{rank}"])
            ]
            if not silent:
                break
            time.sleep(0.1)
        if not silent:
            return f"the ranks lost each other ({_first_line(error)}); check the network between the hosts"
        hosts = [self._store.get(f"fastbert/host/{rank}").decode() for rank in silent]
        names = ", ".join(f"rank {rank} on {host}" for rank, host in zip(silent, hosts))
        return (
            f"{names} died, or kept the others waiting for more than {self._timeout.total_seconds():g} s: "
            "look at what it printed; the same command continues from the last checkpoint "
            "(--rank-timeout waits longer)"
        )


class StopVote:
    """At the end of each step: did any rank get a signal? All ranks learn of it after the same step.

    Hosts exchange one number while the device computes: the answer of a step is read at the end of the next,
    or at once where a step waits for the device anyway.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: tuple[Any, Tensor] | None = None

    def __call__(self, signal: int | None, wait: bool) -> int | None:
        """This rank's signal -> a signal that all ranks agree to stop for, or None."""
        if self._ranks.alone:
            return signal
        answer = self._read()
        vote = torch.tensor([signal or 0])
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._ranks._control, async_op=True)
        self._pending = (work, vote)
        if wait and answer is None:
            answer = self._read()
        return answer

    def _read(self) -> int | None:
        if self._pending is None:
            return None
        work, vote = self._pending
        self._pending = None
        work.wait()
        return int(vote) or None


def shard(model: Any, ranks: Ranks, dtype: torch.dtype | None = None) -> None:
    """Split the weights of a BertForPreTraining among the ranks (FSDP2), before its optimizer is made.

    A layer is put together when it is needed, forward and backward, and taken apart again; gradients are
    summed over the ranks, each of which gets those of its part. `dtype` is that of the weights that are put
    together, the products and the losses' gradients, where it is not that of the parts; sums over ranks and
    micro-batches are fp32 then.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(model.device.type, (ranks.world_size,))
    for module in (*model.bert.encoder.layer, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        # the counts in the losses are those of all ranks already; gloo knows no other sum than the plain one
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "loss_parts")


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights."""
    return any(hasattr(p, "to_local") for p in model.parameters())


class LossParts(nn.Module):
    """`model.loss_parts` as a forward pass, which is what DistributedDataParallel looks after."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model.loss_parts(batch)


def data_parallel(model: Any, ranks: Ranks) -> nn.Module:
    """The model's `loss_parts` with gradients that are the sums over all ranks.

    Buckets are reduced while the backward pass goes on, into the memory that `p.grad` shows. Every rank must
    run as many micro-batches; a batch without targets takes part with gradients of zero.
    """
    module = LossParts(model)
    if ranks.alone or is_sharded(model):  # which sums gradients itself
        return module
    parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    parallel.register_comm_hook(None, _sum_hook)
    return parallel


def without_reduction(module: nn.Module) -> AbstractContextManager[None]:
    """Forward and backward of a micro-batch that others follow in the same step: gradients only add up."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.no_sync()
    if is_sharded(module):
        return _without_reduction_of_shards(module)
    return nullcontext()


@contextmanager
def _without_reduction_of_shards(module: Any) -> Iterator[None]:
    module.model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.model.set_requires_gradient_sync(True)


def _sum_hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP takes the names of types for wrong types
    # its own reduction gives the mean; the counts in the losses are those of all ranks already
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


def _of_this_attempt(store: Any, rank: int, world_size: int) -> Any:
    """A part of the store that is new to all ranks: torchrun's keeps what those before a restart left in it.

    Each rank says a word of its own. Rank 0 calls the words that it finds by its own one; a rank whose word
    is among them answers, and all go on when rank 0 has every answer. It writes nothing after that, so that
    a rank that is already at the next start cannot hear it call for this one.
    """
    word = uuid.uuid4().hex
    hello = [f"fastbert/hello/{other}" for other in range(world_size)]
    store.set(hello[rank], word)
    answered: set[str] = set()
    deadline = time.monotonic() + MEETING_S
    while time.monotonic() < deadline:
        if rank == 0:
            words = [store.get(key).decode() for key in hello] if store.check(hello) else []
            here = {f"fastbert/here/{word}/{other}": words[other] for other in range(1, len(words))}
            if here and store.check(list(here)) and all(store.get(k).decode() == w for k, w in here.items()):
                store.set(f"fastbert/go/{word}", "")
                return dist.PrefixStore(word, store)
            store.set("fastbert/attempt", json.dumps([word, words]))
        elif store.check(["fastbert/attempt"]):
            attempt, words = json.loads(store.get("fastbert/attempt"))
            # after the call was read: rank 0 says "go" before it calls for the next start
            begun = [a for a in answered if store.check([f"fastbert/go/{a}"])]
            if begun:
                return dist.PrefixStore(begun[0], store)
            if words[rank : rank + 1] == [word]:
                store.set(f"fastbert/here/{attempt}/{rank}", word)
                answered.add(attempt)
        time.sleep(0.05)
    raise UserError(
        f"not all {world_size} ranks have come within {MEETING_S:g} s; look at what the others say"
    )


def is_of_communication(error: BaseException) -> bool:
    """Whether the ranks have lost each other, rather than that one of them has failed."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "ProcessGroup", "Connection closed")
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
