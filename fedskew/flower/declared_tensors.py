"""A site sends tensors of a method's part only if this part declares what it sends."""

from __future__ import annotations

from fedskew.engine import RoundWork
from fedskew.errors import UserError, shorten
from fedskew.methods import Objective, Part, Tensors


def refuse_undeclared(work: RoundWork, uplink: Tensors, tally: Tensors) -> None:
    """Refuse to send tensors of a part that does not declare `sends`, even if the part's code comes with the app.

    Every part that sends something must have its own declaration. Otherwise, the declaration of one part would also
    cover the tensors of other parts. `tally` has the counts of the objective, if they are shared.
    """
    senders = [part for part in work.members if type(part).uplink is not Part.uplink]
    counters = [
        part for part in work.members if isinstance(part, Objective) and type(part).tally is not Objective.tally
    ]
    unshared = ", or federation.share_loss = false, so that counts stay at the site"
    for sent, parts, otherwise in ((uplink, senders, ""), (tally, counters, unshared)):
        undeclared = [part for part in parts if not part.sends]
        if sent and undeclared:
            raise UserError(
                f"the method sends {shorten(sorted(sent), 3)} in addition to the model, and its part "
                f"{type(undeclared[0]).__name__} does not declare what it sends; expected `sends` and `reveals` on "
                f"that class{otherwise}"
            )
