"""What methods that work on classification rows ask of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedskew.errors import UserError


def expect_linear_head(who: str, params: Mapping[str, Tensor], classes: int) -> None:
    """Refuse a model without a linear layer `head`, one row a class, at its end."""
    rows = params.get("head.weight")
    if rows is None or rows.dim() != 2 or len(rows) != classes:
        raise UserError(f"{who} needs a model with a linear layer 'head' at its end; choose one of fedskew's models")
