"""What lives: sequences by id, the sequences of each request, and those held back for a sibling."""

from collections.abc import Callable, Iterable
from typing import cast

from scheduler_service.core.prefix import KeyChain
from scheduler_service.core.request import Request, Sequence


class LiveSequences:
    """The register of live sequences. Knows nothing of where they stand or what they hold.

    `by_id` is for look-ups only. `held_back` are the siblings of a request's first sequence, by its
    id: they wait outside the queue until the prompt blocks that they will share are computed.
    `num_speculating` counts the sequences that may draft.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.held_back: dict[int, list[Sequence]] = {}
        self.num_speculating = 0
        self._of_request: dict[str, list[Sequence]] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of_request

    def of(self, request_id: str) -> list[Sequence]:
        """The live sequences of a request, the first of them first."""
        return list(self._of_request.get(request_id, ()))

    def is_live(self, request: Request) -> bool:
        """Whether this very request lives, not another one of its id."""
        sequences = self._of_request.get(request.request_id)
        return sequences is not None and sequences[0].request is request

    def add(self, request: Request, arrival: float, make_keys: Callable[[Request], KeyChain]) -> list[Sequence]:
        """Makes the sequences of a request and holds all but the first back."""
        # Not copied before it starts: of a waiting sequence it is the request's and does not change.
        prompt = cast(list[int], request.prompt_token_ids)
        kv_limit = len(prompt) + request.max_tokens - 1
        known_ids = dict.fromkeys(range(request.n), prompt)
        if request.priors is not None:
            known_ids = {index: [*prompt, *prior] for index, prior in request.priors.items()}
        sequences = [
            Sequence(self._new_id(), index, request, arrival, known, kv_limit, make_keys(request))
            for index, known in known_ids.items()
        ]
        self._of_request[request.request_id] = list(sequences)
        self.by_id.update((sequence.sequence_id, sequence) for sequence in sequences)
        if request.max_draft_tokens:
            self.num_speculating += len(sequences)
        if len(sequences) > 1:
            self.held_back[sequences[0].sequence_id] = sequences[1:]
        return sequences

    def adopt(self, sequences: list[Sequence]) -> None:
        """Takes the sequences of one request that lived elsewhere, and gives them ids of its own; none is held back."""
        request = sequences[0].request
        for sequence in sequences:
            sequence.sequence_id = self._new_id()
        self._of_request[request.request_id] = list(sequences)
        self.by_id.update((sequence.sequence_id, sequence) for sequence in sequences)
        if request.max_draft_tokens:
            self.num_speculating += len(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that has ended and is not held back."""
        del self.by_id[sequence.sequence_id]
        if sequence.request.max_draft_tokens:
            self.num_speculating -= 1
        rest = self._of_request[sequence.request.request_id]
        rest.remove(sequence)
        if not rest:
            del self._of_request[sequence.request.request_id]

    def renew_id(self, sequence: Sequence) -> None:
        """Gives a sequence a new id, so that what is said of the old one concerns nobody."""
        siblings = self.held_back.pop(sequence.sequence_id, None)
        del self.by_id[sequence.sequence_id]
        sequence.sequence_id = self._new_id()
        self.by_id[sequence.sequence_id] = sequence
        if siblings is not None:
            self.held_back[sequence.sequence_id] = siblings

    def take_held_back(self, leader: Sequence) -> list[Sequence]:
        """The siblings that were held back for a sequence, which are so no longer."""
        return self.held_back.pop(leader.sequence_id, [])

    def drop_held_back(self, sequence: Sequence) -> bool:
        """Takes a sequence that has ended out of those held back; False when it is not one of them."""
        leader = self._of_request[sequence.request.request_id][0]
        siblings = self.held_back.get(leader.sequence_id, [])
        if sequence not in siblings:
            return False
        siblings.remove(sequence)
        return True

    def check_integrity(self, places: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless each live sequence stands in one of `places`, or is held back, once."""
        held_back = [sequence for siblings in self.held_back.values() for sequence in siblings]
        if sorted(s.sequence_id for s in [*places, *held_back]) != sorted(self.by_id):
            raise RuntimeError("the live sequences are not those that run, wait, drain or are held back, each once")
        if sorted(s.sequence_id for rest in self._of_request.values() for s in rest) != sorted(self.by_id):
            raise RuntimeError("requests and sequences disagree")

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
