"""This rank's connections to the others of its group: sums within a stage, activations and tokens between stages."""

import ctypes
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import (  # type: ignore[attr-defined]  # documented, and not in __all__
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from loader.shares import RankPlace
from worker_service.kernels.shared import SUMMED, SharedCollectives
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.rendezvous import BoundStore, bind_store, connect_store, interface_address
from worker_service.runtime.report import CollectiveCost, Meeting
from worker_service.runtime.shared_memory import share_memory

IntArray = NDArray[np.int64]

# What pairs of ranks tell messages apart by.
_HIDDEN_TAG, _TOKENS_TAG = 0, 1
_MOST_MEETING_S = 15.0


class GroupSettings(Protocol):
    """What a group needs of the worker's settings."""

    @property
    def rendezvous(self) -> str: ...
    @property
    def collective_interface(self) -> str: ...
    @property
    def collective_timeout(self) -> float: ...


class RankGroup:
    """The group of one rank, formed anew in every epoch. Used by the device thread alone.

    Implements worker_service.models.collectives.Collectives for the ranks of this stage. Whatever is wrong with
    another rank is RuntimeFailure "peer_lost"; the group is left then, so that the others learn of it too.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._bound: BoundStore | None = None
        self._bound_epoch = 0
        self._stage: Any = None
        self._column: Any = None
        # In place of the stage's connections, which are there all the same, where its ranks are on one machine.
        self._shared: SharedCollectives | None = None
        # Their buffers are in use until the other side has taken, or filled, them.
        self._unsent: deque[tuple[Work, torch.Tensor]] = deque()
        self._expected: deque[tuple[Work, torch.Tensor]] = deque()
        self._device = torch.device("cpu")
        self.place = RankPlace()
        self.cost = CollectiveCost()

    # Its life.

    @property
    def is_formed(self) -> bool:
        """Whether the ranks have met, and none has been lost since; always so of a group of one."""
        place = self.place
        has_stage = place.tensor_parallel_size == 1 or self._stage is not None
        return has_stage and (place.pipeline_parallel_size == 1 or self._column is not None)

    def bind(self, epoch: int) -> str:
        """As rank 0: where the ranks are to meet in this epoch. Raises RuntimeFailure "rendezvous_failed"."""
        if self._bound is None or self._bound_epoch != epoch:
            self._bound = None
            settings = self._settings
            self._bound = bind_store(settings.rendezvous, settings.collective_interface, settings.collective_timeout)
            self._bound_epoch = epoch
        return self._bound.address

    def form(
        self, place: RankPlace, device: torch.device, meeting: Meeting, library: ctypes.CDLL | None = None
    ) -> None:
        """Meets the other ranks; blocks until all have come.

        All of them compute with plain torch or all with the compiled kernels, whose `library` also lets those on one
        machine share memory.

        Raises RuntimeFailure "rendezvous_failed", or "invalid" for ranks that are not alike.
        """
        self.leave()
        self.place, self._device = place, device
        store = PrefixStore(f"epoch{meeting.epoch}", self._store(meeting))
        store.set_timeout(timedelta(seconds=self._meeting_s))
        try:
            kernels = "torch" if library is None else "compiled kernels"
            self._check_alike(store, f"{kernels} on {device.type}")
            if place.tensor_parallel_size > 1:
                prefix = PrefixStore(f"stage{place.pipeline_rank}", store)
                self._stage = self._connect(prefix, place.tensor_rank, place.tensor_parallel_size)
                if library is not None:
                    timeout_s = self._settings.collective_timeout
                    self._shared = share_memory(
                        library, prefix, place.tensor_rank, place.tensor_parallel_size, timeout_s
                    )
            if place.pipeline_parallel_size > 1:
                prefix = PrefixStore(f"column{place.tensor_rank}", store)
                self._column = self._connect(prefix, place.pipeline_rank, place.pipeline_parallel_size)
        except RuntimeError as error:
            self.leave()
            raise RuntimeFailure(
                "rendezvous_failed",
                f"the ranks of the group did not all come to {meeting.address} within "
                f"{self._meeting_s:g} s, or cannot reach each other there "
                f"({str(error).partition(chr(10))[0][:200]}); see that all workers run and that collective_interface "
                "is a network which they share",
                {"rendezvous": meeting.address},
            ) from error

    @property
    def _meeting_s(self) -> float:
        # All ranks are asked at the same time, and nothing is computed before they have met.
        return min(self._settings.collective_timeout, _MOST_MEETING_S)

    def leave(self) -> None:
        """Closes the connections: ranks that wait for this one fail at once."""
        self._unsent.clear()
        self._expected.clear()
        self._stage = self._column = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    @contextmanager
    def left_on_failure(self) -> Iterator[None]:
        """Leaves when what it spans raises: the other ranks would wait for what this one does not do."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def _store(self, meeting: Meeting) -> Store:
        if self._bound is not None and self._bound_epoch == meeting.epoch and self._bound.address == meeting.address:
            return self._bound.store
        return connect_store(meeting.address, self._meeting_s)

    def _check_alike(self, store: Store, kind: str) -> None:
        """Ranks on devices of different kinds speak through different libraries; other kernels order rows otherwise."""
        place = self.place
        store.set(f"kind{place.rank}", kind)
        for rank in range(place.num_ranks):
            theirs = store.get(f"kind{rank}").decode()
            if theirs != kind:
                raise RuntimeFailure(
                    "invalid",
                    f"this rank computes by {kind} and rank {rank} by {theirs}; give all workers of a group the same "
                    "device and native_kernels, and their hosts a compiler or none",
                    {"field": "device", "expected": theirs, "found": kind},
                )

    def _connect(self, store: Store, rank: int, size: int) -> Any:
        timeout = timedelta(seconds=self._settings.collective_timeout)
        if self._device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return ProcessGroupNCCL(store, rank, size, nccl)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # has no public name
        options._timeout = timedelta(seconds=self._meeting_s)
        options._threads = 2
        address = interface_address(self._settings.collective_interface)
        options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        group = ProcessGroupGloo(store, rank, size, options)
        group.set_timeout(timeout)
        return group

    def on_all_ranks(self, is_so: bool) -> bool:
        """Whether it is so on every rank of the group; all of them must ask."""
        flag = torch.tensor([0.0 if is_so else 1.0], device=self._device)
        for group in (self._stage, self._column):
            if group is not None:
                with self._measured(flag):
                    group.allreduce([flag]).wait()
        return not bool(flag.item())

    # Within the stage.

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this stage, in place."""
        with self._measured(tensor):
            if self._shared is not None and tensor.dtype in SUMMED and tensor.is_contiguous():
                self._shared.all_reduce(tensor)
            else:
                self._stage.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, width] of every rank of this stage -> [rows, ranks * width], in their order."""
        rows, width = tensor.shape
        size = self.place.tensor_parallel_size
        gathered = tensor.new_empty(size, rows, width)
        with self._measured(tensor):
            if self._shared is not None:
                self._shared.all_gather(tensor.contiguous(), gathered)
            else:
                self._stage.allgather([list(gathered.unbind())], [tensor.contiguous()]).wait()
        return gathered.permute(1, 0, 2).reshape(rows, size * width)

    def likeliest(self, logits: torch.Tensor, first_id: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Of [rows, this rank's token ids], from `first_id` on: the likeliest token id of all ranks, the first one of
        several, and whether its logit is finite."""
        peaks, places = logits.max(-1)
        # Token ids are exact in float64, as are logits of any type.
        theirs = self.all_gather(torch.stack((peaks.double(), (places + first_id).double()), -1))
        peaks_of, ids_of = theirs[:, 0::2], theirs[:, 1::2]
        best, rank = peaks_of.max(-1)
        token_ids = ids_of.gather(1, rank[:, None])[:, 0].long()
        return token_ids.cpu().numpy(), torch.isfinite(best).cpu().numpy()

    def agree(self, values: IntArray) -> IntArray:
        """Tensor rank 0's `values`, on every rank of this stage."""
        tensor = torch.from_numpy(values.copy()).to(self._device)
        with self._measured(tensor):
            if self._shared is not None:
                self._shared.broadcast(tensor)
            else:
                self._stage.broadcast([tensor]).wait()
        agreed: IntArray = tensor.cpu().numpy()
        return agreed

    # Between the stages.

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Hands hidden states [num_tokens, hidden_size] to the next stage; goes on before they are there."""
        self._send(hidden, self.place.pipeline_rank + 1, _HIDDEN_TAG)

    def receive_hidden(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The hidden states of the stage before, [num_tokens, hidden_size]."""
        hidden = torch.empty(num_tokens, hidden_size, dtype=dtype, device=self._device)
        with self._measured(hidden):
            self._column.recv([hidden], self.place.pipeline_rank - 1, _HIDDEN_TAG).wait()
        return hidden

    def send_tokens(self, tokens: IntArray) -> None:
        """From the last stage, to every other: what was sampled."""
        tensor = torch.from_numpy(tokens).to(self._device)
        for stage in range(self.place.pipeline_parallel_size - 1):
            self._send(tensor, stage, _TOKENS_TAG)

    def expect_tokens(self, count: int) -> None:
        """Begins to receive `count` sampled tokens from the last stage, for `take_tokens`."""
        tensor = torch.empty(count, dtype=torch.int64, device=self._device)
        with self._measured(tensor):
            work = self._column.recv([tensor], self.place.pipeline_parallel_size - 1, _TOKENS_TAG)
            self._expected.append((work, tensor))

    def take_tokens(self) -> IntArray:
        """The oldest tokens expected and not yet taken; waits for them."""
        work, tensor = self._expected.popleft()
        with self._measured(None):
            work.wait()
        tokens: IntArray = tensor.cpu().numpy()
        return tokens

    def _send(self, tensor: torch.Tensor, stage: int, tag: int) -> None:
        tensor, num_stages = tensor.contiguous(), self.place.pipeline_parallel_size
        with self._measured(tensor):
            self._unsent.append((self._column.send([tensor], stage, tag), tensor))
            # What was sent before so many steps has arrived: the scheduler has had their answers.
            if len(self._unsent) > (num_stages + 2) * (num_stages - 1):
                self._unsent.popleft()[0].wait()

    @contextmanager
    def _measured(self, tensor: torch.Tensor | None) -> Iterator[None]:
        """Counts a collective, and gives what goes wrong in it its meaning."""
        if not self.is_formed:
            raise _peer_lost("this rank has left its group")
        begin = time.perf_counter_ns()
        try:
            yield
        except RuntimeError as error:
            self.leave()
            # What gloo adds to a cause is advice for people who debug gloo.
            raise _peer_lost(str(error).partition("\n")[0].partition(" This is typically")[0][:300]) from error
        cost = self.cost
        cost.num_calls += 1
        cost.num_bytes += 0 if tensor is None else tensor.nbytes
        cost.duration_ns += time.perf_counter_ns() - begin


def _peer_lost(cause: str) -> RuntimeFailure:
    return RuntimeFailure(
        "peer_lost",
        f"another rank of the group was lost, or did not answer within collective_timeout: {cause}",
        {"cause": cause},
    )
