"""The draft of the codes family: one inference, codes sampled from it, and the actions they decode to."""

from __future__ import annotations

import numpy as np

from specact.families.codes.sampling import sample_codes
from specact.families.codes.spec import InfersCodes
from specact.families.codes.tokenizer import ActionTokenizer
from specact.families.codes.values import Drafted
from specact.observation import Window
from specact.types import Proposal


class CodeDrafter:
    """Proposes codes ``z ~ q``, see :class:`~specact.policy.Drafter`.

    Args:
        policy: gives q.
        tokenizer: turns codes into actions.
    """

    def __init__(self, policy: InfersCodes, tokenizer: ActionTokenizer) -> None:
        self._policy, self._tokenizer = policy, tokenizer

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        """The drafted chunk; its evidence is a :class:`~specact.families.codes.values.Drafted`."""
        draft = self._policy.infer(window)
        codes = sample_codes(draft, rng)
        return Proposal(window, self._tokenizer.decode(codes, draft.offsets), Drafted(draft, codes))
