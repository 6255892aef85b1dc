"""One decision by hand: the draft proposes, the gate decides, the target verifies and corrects.

Needs: pip install specact. Takes a second or two. The bundle `ball` comes with the package.
"""

from collections import Counter

import numpy as np

import specact
from specact import sampling
from specact.observation import ObservationHistory
from specact.pair import LocalTarget
from specact.rng import StepAddress
from specact.types import Outcome

bundle = specact.load_pair("ball")
gate = specact.calibrated_gate(bundle, "adahi", rate=0.6)
verifier = bundle.verifier(LocalTarget(bundle.target()))
rng = np.random.default_rng(0)

# 1. The draft looks at the newest observations, and proposes a chunk of actions: one code for each codebook.
history = ObservationHistory(bundle.observation)
state = np.array([0.7, 0.1, -0.1, 0.2, 0.0, 0.0, 0.0, 0.0])  # ball, its velocity, tilt, tilt rate; each within [-1, 1]
window = history.push({"state": state, "goal": np.array([-0.6, 0.1])})
proposal = bundle.drafter().propose(window, rng)
draft, codes = proposal.evidence.draft, proposal.evidence.codes
print(f"draft:   codes {codes}, first action {bundle.units.to_environment(proposal.actions[0])}")

# 2. The gate scores the proposal. An episode's first step is always sent: a gate that looks back knows nothing yet.
decision = gate.decide(proposal, rng)
print(f"gate:    {'send' if decision.transmit else 'skip'} ({decision.reason}; threshold {decision.threshold:.3f})")

# 3. The target's distribution p over the same codes: each code z is kept with probability min(1, p(z) / q(z)).
target = bundle.target().answer(window, StepAddress(0, 0, 0, 0))
kept = 1.0 - sampling.rejection_probability(target.probs, draft.probs, codes)
print(f"target:  keeps the drafted codes with probability {np.round(kept, 3)}")

# 4. A code that is not kept is drawn again, from what the target has more of than the draft: max(0, p - q).
outcome = verifier.submit(proposal, StepAddress(0, 0, 0, 0)).result()
assert isinstance(outcome, Outcome)
print(f"verdict: codes {outcome.evidence.codes}, first action {bundle.units.to_environment(outcome.actions[0])}")

# 5. Exact: over many draws the final codes have the target's distribution, whatever the draft is.
draws, final, drafted = 20_000, Counter[int](), Counter[int]()
for _ in range(draws):
    codes = sampling.sample_codes(draft, rng)
    drafted[int(codes[0])] += 1
    final[int(sampling.verify(target, draft, codes, rng).codes[0])] += 1
print(f"\nfirst code  draft q  target p  drafted  verified   ({draws} draws)")
for code in np.argsort(-target.probs[0])[:6]:
    q, p = draft.probs[0, code], target.probs[0, code]
    print(f"{code:10d}  {q:7.3f}  {p:8.3f}  {drafted[code] / draws:7.3f}  {final[code] / draws:8.3f}")
print("\nNext: examples/hold_a_rate.py, and docs/explain/concepts.md")
